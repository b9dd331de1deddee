// These macros are for functions that run on the host and in CUDA kernels alike: one marks them; the other keeps a loop
// as it is in a kernel whose threads are short of registers.
#pragma once

#if defined(__CUDACC__)
#define FLASHTILE_HOST_DEVICE __host__ __device__ __forceinline__
#define FLASHTILE_NO_UNROLL _Pragma("unroll 1")
#else
#define FLASHTILE_HOST_DEVICE inline
#define FLASHTILE_NO_UNROLL
#endif
