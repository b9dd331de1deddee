// This file holds what kernels that round to fp8 have in common: a row's rotation, scales and numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "flashtile/quantize.h"

namespace flashtile {

constexpr int kChunk = 8;  // neighbouring elements, which a thread reads at once
constexpr float kInfinite = __builtin_huge_valf();

/// Replaces a and b by their sum and their difference.
__device__ inline void add_and_subtract(float& a, float& b) {
  const float difference = a - b;
  a += b;
  b = difference;
}

/// Multiplies with the part of a Hadamard matrix in which the elements of other threads meet those of this one, whose
/// indices differ from theirs in one bit: that by which threads differ in `bit`.
template <int kCount>
__device__ void meet_other_thread(float (&x)[kCount], int bit) {
  const float sign = (threadIdx.x & bit) != 0 ? -1.0f : 1.0f;
#pragma unroll
  for (float& own : x) own = fmaf(sign, own, __shfl_xor_sync(0xffffffff, own, bit));  // the product is exact
}

struct Scale {
  float descale, inverse;

  /// For numbers of which none is larger.
  static __device__ Scale of(float largest) {
    constexpr float kLargest = 448;      // of e4m3
    constexpr float kLeast = 0x1p-126f;  // descale, so that its inverse is finite
    const float descale = largest == 0 ? 0.0f : fmaxf(__fdiv_rn(largest, kLargest), kLeast);
    return {descale, largest == 0 ? 0.0f : __fdiv_rn(1.0f, descale)};
  }
};

/// Returns four elements times `inverse` as e4m3 numbers.
__device__ inline unsigned rounded(const float* x, float inverse) {
  const auto pair = [&](int i) {
    return unsigned(__nv_cvt_float2_to_fp8x2({x[i] * inverse, x[i + 1] * inverse}, __NV_SATFINITE, __NV_E4M3));
  };
  return pair(0) | pair(2) << 16;
}

/// Returns the largest value of all threads; none is negative. `of_warps` is shared memory for it.
template <int kWarps>
__device__ float largest_of_block(float own, unsigned (&of_warps)[kWarps]) {
  const unsigned of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(own));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();  // all threads wait for the warps' largest values
  unsigned most = 0;
#pragma unroll
  for (const unsigned warp : of_warps) most = max(most, warp);
  return __uint_as_float(most);
}

// Where four threads share a row, thread t of them has its chunks t, t + 4, and so on.
constexpr int kSharers = 4;

/// Multiplies a thread's share of a row with the Hadamard matrix, which has as many steps as its side has bits: in each
/// of them elements whose indices differ in one bit meet. Bits 0 to 2 are those within a chunk, 3 and 4 say which
/// thread of the four it is, and the others which of its chunks.
template <int kChunks>
__device__ void rotate(float (&x)[kChunks][kChunk], int side) {
#pragma unroll
  for (int bit = 1; bit < kChunk; bit *= 2)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if ((i & bit) == 0) add_and_subtract(x[c][i], x[c][i + bit]);
#pragma unroll
  for (int bit = 1; bit < kSharers; bit *= 2) {
    if (side <= kChunk * bit) return;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) meet_other_thread(x[c], bit);
  }
#pragma unroll
  for (int bit = 1; bit < kChunks; bit *= 2) {
    if (side <= kChunk * kSharers * bit) return;
#pragma unroll
    for (int c = 0; c + bit < kChunks; ++c)
      if ((c & bit) == 0)
#pragma unroll
        for (int i = 0; i < kChunk; ++i) add_and_subtract(x[c][i], x[c + bit][i]);
  }
}

/// Widens a thread's share of a row, as it was read, and rotates it where the side is above 1.
template <class Element, int kChunks>
__device__ void widen_and_rotate(const uint4 (&read)[kChunks], float (&x)[kChunks][kChunk], int side,
                                 const Signs& signs) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const auto* const elements = reinterpret_cast<const Element*>(&read[c]);
    const int chunk = int(threadIdx.x) % kSharers + kSharers * c;
    const unsigned flips = side > 1 ? unsigned(signs[chunk / 8] >> (chunk % 8 * 8)) : 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      x[c][i] = __uint_as_float(__float_as_uint(float(elements[i])) ^ (flips << (31 - i) & 1u << 31));
  }
  if (side > 1) rotate(x, side);
}

}  // namespace flashtile
