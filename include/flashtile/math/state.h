// Softmax over a set of keys, as a value that two disjoint sets can merge: online softmax, split-KV decoding and
// ring attention are this one idea (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).
#pragma once

#include "flashtile/macros.h"
#include "flashtile/math/softmax.h"

namespace flashtile {

FLASHTILE_HOST_DEVICE float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(x);
#else
  return 1 / x;
#endif
}

/// x / y for |y| ≤ 2^126, on a GPU without the subroutine that rounds it correctly: callers work out the remainder.
FLASHTILE_HOST_DEVICE float quotient(float x, float y) {
#ifdef __CUDA_ARCH__
  return __fdividef(x, y);
#else
  return x / y;
#endif
}

FLASHTILE_HOST_DEVICE float finite(float x) {
  return fminf(fmaxf(x, -kLargest), kLargest);
}

/// a − b · c, with one rounding of what is left.
FLASHTILE_HOST_DEVICE float less_product(float a, float b, float c) {
  const float product = finite(b * c);
  return (a - product) - fmaf(b, c, -product);
}

/// From this size on, in log2 units, what a row's weights are relative to is too large for one rounded float32: at half
/// of it rounding changes a weight by a factor of 1 ± 2^-15. Such a row is called steep.
inline constexpr float kSteep = 0x1p10f;

/// The softmax of a finished row: its weights are 2^((score − reference) · unit_log2 − log2_sum), the unit being that
/// of ScoreMap. Differences and sum are small next to large scores, of which a log-sum-exp in one float32 would be off
/// by units: so this is what a backward is given.
struct FinishedRow {
  float reference = 0;          // a score
  float log2_sum = -kInfinity;  // −inf: the row saw nothing

  /// What one float32 can say of it: an lse, natural. Less exact than the row that had it.
  FLASHTILE_HOST_DEVICE static FinishedRow of_lse(float lse, float unit) {
    if (lse == -kInfinity) return {};
    const float reference = finite(quotient(lse, unit));
    return {reference, finite(less_product(lse, reference, unit) * kLog2e)};
  }

  FLASHTILE_HOST_DEVICE bool saw_nothing() const { return log2_sum == -kInfinity; }
  FLASHTILE_HOST_DEVICE float lse_log2(float unit_log2) const { return fmaf(reference, unit_log2, log2_sum); }
  FLASHTILE_HOST_DEVICE bool steep(float unit_log2) const {
    return !saw_nothing() && fabsf(lse_log2(unit_log2)) >= kSteep;
  }
  /// The natural logarithm of Σ e^logit; −inf for a row that saw nothing. A NaN among the scores makes it NaN.
  FLASHTILE_HOST_DEVICE float lse(float unit) const { return fmaf(reference, unit, log2_sum * kLn2); }
  /// How far a sink's logit is above that, in log2 units: its weight is 2 to that power.
  FLASHTILE_HOST_DEVICE float above_lse_log2(float sink, float unit) const {
    return less_product(sink, reference, unit) * kLog2e - log2_sum;
  }
};

/// A row all of whose scores are counted, a sink among them: sum = Σ 2^((score − reference) · unit_log2 − log2_scale).
struct RowTotal {
  float reference = 0;
  float log2_scale = 0;
  float sum = 0;
  float normaliser = 0;  // what the accumulated output is multiplied with; 0 for a row that saw nothing

  /// Takes a logarithm, which an inference does without: it wants the normaliser alone.
  FLASHTILE_HOST_DEVICE FinishedRow finished() const {
    if (sum == 0) return {};
    return {reference, log2_scale + log2f(sum)};
  }
};

/// sum = Σ 2^((score − reference) · unit_log2). The reference is any finite number near the row's greatest score; −inf:
/// nothing seen yet.
struct RowState {
  float reference = -kInfinity;
  float sum = 0;

  /// Moves to a new reference; returns the factor for everything accumulated under the old one.
  FLASHTILE_HOST_DEVICE float rebase(float new_reference, float unit_log2) {
    const float factor = reference == new_reference ? 1.0f : exp2f((reference - new_reference) * unit_log2);
    reference = new_reference;
    sum *= factor;
    return factor;
  }

  /// `sink` is one logit more, that no value belongs to: −inf for none.
  FLASHTILE_HOST_DEVICE RowTotal total(float sink, float unit) const {
    RowTotal row{reference, 0, sum, 1};
    if (sink != -kInfinity) {
      const float above = sum == 0 ? kInfinity : less_product(sink, reference, unit) * kLog2e;
      if (above <= 0) {
        row.sum += exp2f(above);
      } else {
        // The sink is the greatest logit: weights are taken relative to it, or what of it the unit of scores can say.
        const FinishedRow of_sink = FinishedRow::of_lse(sink, unit);
        const float factor = exp2f(-above);
        row = {of_sink.reference, of_sink.log2_sum, sum * factor + 1, factor};
      }
    }
    row.normaliser = row.sum == 0 ? 0.0f : row.normaliser * reciprocal(row.sum);
    return row;
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
