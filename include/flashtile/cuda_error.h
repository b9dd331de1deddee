// CUDA runtime errors as exceptions, and the one attribute that kernels need before their first launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "flashtile/error.h"

namespace flashtile {

inline void throw_on_error(cudaError_t status, const char* action) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // leave no error behind for the next caller of the runtime
  throw CudaError(std::string(action) + ": " + cudaGetErrorString(status));
}

/// Lets `kernel` have `bytes` of dynamic shared memory on `device`; a load and a test after the first call.
template <class... Args>
void allow_shared_memory(void (*kernel)(Args...), int bytes, int device, std::atomic<std::uint64_t>& done) {
  const std::uint64_t bit = std::uint64_t{1} << (device & 63);
  if (done.load(std::memory_order_relaxed) & bit) return;
  throw_on_error(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "shared memory of a kernel");
  done.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace flashtile
