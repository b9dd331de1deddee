// This file turns errors of the CUDA runtime into exceptions.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "flashtile/error.h"

namespace flashtile {

inline void throw_on_error(cudaError_t status, const char* action) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // leaves no error behind for the next caller of the runtime
  throw CudaError(std::string(action) + ": " + cudaGetErrorString(status));
}

}  // namespace flashtile
