// CUDA runtime errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "flashtile/error.h"

namespace flashtile {

inline void throw_on_error(cudaError_t status, const char* action) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // leave no error behind for the next caller of the runtime
  throw CudaError(std::string(action) + ": " + cudaGetErrorString(status));
}

}  // namespace flashtile
