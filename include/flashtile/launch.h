// Launches through the driver's own entry, which takes 0.2 µs less than the runtime's.
#pragma once

#include <array>
#include <atomic>

#include "flashtile/driver.h"
#include "flashtile/plan.h"

namespace flashtile {

inline constexpr int kMaxDevices = 64;

/// The driver's functions of one kernel, by device; made ready at the first launch on each.
class KernelHandles {
 public:
  /// The function of `kernel` on `device`, the current one, free to take `shared_memory` bytes.
  CUfunction get(const void* kernel, int device, int shared_memory) {
    std::atomic<CUfunction>& handle = handles_[device];
    if (CUfunction known = handle.load(std::memory_order_acquire)) return known;
    cudaFunction_t function = nullptr;
    throw_on_error(cudaGetFuncBySymbol(&function, kernel), "loading a kernel");
    throw_on_error(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory),
                   "shared memory of a kernel");
    handle.store(function, std::memory_order_release);
    return function;
  }

 private:
  std::array<std::atomic<CUfunction>, kMaxDevices> handles_{};
};

/// Launches `kernel` on the plan's grid, as a one-dimensional block of `threads`.
template <class Params>
void launch(void (*kernel)(Params), KernelHandles& handles, const Plan& plan, int threads, Params params,
            Stream stream) {
  static const auto start = driver_function<decltype(&cuLaunchKernel)>("cuLaunchKernel");
  const CUfunction function =
      handles.get(reinterpret_cast<const void*>(kernel), plan.problem.device.index, plan.shared_memory);
  void* arguments[] = {&params};
  call_driver("launch of a kernel", plan.problem.device.index, [&] {
    return start(function, plan.grid, 1, 1, threads, 1, 1, plan.shared_memory, static_cast<CUstream>(stream), arguments,
                 nullptr);
  });
}

}  // namespace flashtile
