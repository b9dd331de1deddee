// Softmax over a set of keys, as a value that two disjoint sets can merge: online softmax, split-KV decoding and
// ring attention are this one idea (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).
#pragma once

#include <cmath>
#include <limits>

#include "flashtile/macros.h"
#include "flashtile/math/softmax.h"

namespace flashtile {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

FLASHTILE_HOST_DEVICE float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(x);
#else
  return 1 / x;
#endif
}

/// sum = Σ 2^(s_log2 − reference). The reference is any value near the row's maximum; −inf: nothing seen yet.
struct RowState {
  float reference_log2 = -kInfinity;
  float sum = 0;

  /// Natural-log lse; −inf for a row that saw nothing. A NaN among the scores makes it NaN.
  FLASHTILE_HOST_DEVICE float lse() const { return sum == 0 ? -kInfinity : (reference_log2 + log2f(sum)) * kLn2; }

  /// What the accumulated output is multiplied with at the end: 0 for a row that saw nothing.
  FLASHTILE_HOST_DEVICE float normaliser() const { return sum == 0 ? 0.0f : reciprocal(sum); }

  /// A weight that no value belongs to, such as a sink's, joins the sum. Returns the factor for everything accumulated.
  FLASHTILE_HOST_DEVICE float join(float exponent) {
    const bool below = exponent <= reference_log2;
    const float smaller = exponent == -kInfinity ? 0.0f : exp2f(-fabsf(exponent - reference_log2));
    sum = below ? sum + smaller : sum * smaller + 1;
    reference_log2 = below ? reference_log2 : exponent;
    return below ? 1.0f : smaller;
  }

  /// Moves to a new reference; returns the factor for everything accumulated under the old one.
  FLASHTILE_HOST_DEVICE float rebase(float new_reference_log2) {
    const float factor = reference_log2 == new_reference_log2 ? 1.0f : exp2f(reference_log2 - new_reference_log2);
    reference_log2 = new_reference_log2;
    sum *= factor;
    return factor;
  }
};

/// Weights of two partial results (out_a, lse_a), (out_b, lse_b) over disjoint keys:
/// out = a · out_a + b · out_b, with the lse of the union.
struct Merge {
  float a = 0;
  float b = 0;
  float lse = -kInfinity;

  FLASHTILE_HOST_DEVICE static Merge of(float lse_a, float lse_b) {
    const float top = lse_a > lse_b ? lse_a : lse_b;
    if (top == -kInfinity) return {};
    const float a = expf(lse_a - top);
    const float b = expf(lse_b - top);
    return {a / (a + b), b / (a + b), top + logf(a + b)};
  }
};

}  // namespace flashtile
