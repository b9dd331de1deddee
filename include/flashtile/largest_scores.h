// This file holds the largest score of each head, which thread blocks raise together while they compute attention.
#pragma once

#include <cstdint>

#include "flashtile/macros.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// LargestScores are the largest logits of the heads, (B, H_q), contiguous, −inf before any kernel has raised them; or
/// none are wanted.
struct LargestScores {
  float* of_heads;  // or null
  int heads;        // H_q

  static LargestScores of(const TensorView& t) {
    return t.given() ? LargestScores{static_cast<float*>(t.data), static_cast<int>(t.shape[1])} : LargestScores{};
  }

  FLASHTILE_HOST_DEVICE bool wanted() const { return of_heads != nullptr; }
  FLASHTILE_HOST_DEVICE float* at(int batch, int head) const { return of_heads + std::int64_t{batch} * heads + head; }

#ifdef __CUDACC__
  /// Returns the largest logit that thread blocks have found so far. Others may find larger ones meanwhile.
  __device__ float so_far(int batch, int head) const { return __ldcg(at(batch, head)); }

  /// Makes it at least `logit`. Memory does such operations one after the other for all heads that share a line of it,
  /// so callers first ask whether it is more than what has been found so far. The bits of positive numbers are in the
  /// order of integers, those of negative ones in the reverse order of unsigned ones, and each of these is more as an
  /// unsigned integer, and less as a signed one, than any positive number.
  __device__ void raise(int batch, int head, float logit) const {
    const int bits = __float_as_int(logit);
    if (bits >= 0)
      atomicMax(reinterpret_cast<int*>(at(batch, head)), bits);
    else
      atomicMin(reinterpret_cast<unsigned*>(at(batch, head)), static_cast<unsigned>(bits));
  }
#endif
};

}  // namespace flashtile
