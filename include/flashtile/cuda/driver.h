// This file calls functions of the CUDA driver that is installed. The library does not link to the driver, so that it
// loads where there is none.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "flashtile/cuda/error.h"

namespace flashtile {

/// Returns the driver's function `name` as of CUDA 12.0.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  throw_on_error(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) throw CudaError(std::string(name) + ": not in the CUDA driver");
  return reinterpret_cast<Function>(function);
}

/// The driver numbers its errors as the runtime does.
inline void throw_on_error(CUresult status, const char* action) {
  throw_on_error(static_cast<cudaError_t>(status), action);
}

/// Runs `call`, a call of the driver for `device`. A thread that has not used CUDA yet has no context: the runtime
/// would have made the device's its current one by itself, here cudaSetDevice does, and the call is repeated.
template <class Call>
void call_driver(const char* action, int device, Call&& call) {
  CUresult status = call();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    throw_on_error(cudaSetDevice(device), "cudaSetDevice");
    status = call();
  }
  throw_on_error(status, action);
}

}  // namespace flashtile
