// This macro marks functions that run on the host and in CUDA kernels alike.
#pragma once

#if defined(__CUDACC__)
#define FLASHTILE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHTILE_HOST_DEVICE inline
#endif
