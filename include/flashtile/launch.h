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

struct LaunchShape {
  int grid = 0;  // thread blocks; none: nothing is launched
  int threads = 0;
  int shared_memory = 0;  // bytes
};

/// Launches `kernel` on `device`, the current one, in one dimension.
template <class Params>
void launch(void (*kernel)(Params), KernelHandles& handles, Device device, LaunchShape shape, const Params& params,
            Stream stream) {
  if (shape.grid == 0) return;
  static const auto start = driver_function<decltype(&cuLaunchKernel)>("cuLaunchKernel");
  const CUfunction function = handles.get(reinterpret_cast<const void*>(kernel), device.index, shape.shared_memory);
  void* arguments[] = {const_cast<Params*>(&params)};  // read only
  call_driver("launch of a kernel", device.index, [&] {
    return start(function, shape.grid, 1, 1, shape.threads, 1, 1, shape.shared_memory, static_cast<CUstream>(stream),
                 arguments, nullptr);
  });
}

}  // namespace flashtile
