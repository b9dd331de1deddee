// This file has softmax over a set of keys as a value that two disjoint sets can merge: online softmax, split-KV
// decoding and ring attention are this one idea (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).
#pragma once

#include "flashtile/macros.h"
#include "flashtile/math/softmax.h"

namespace flashtile {

/// Returns 1 / x. On a GPU it may be off by one unit in the last place, and takes one instruction in place of the
/// thirty of the correctly rounded one, which stand on the way of a call's last rows.
FLASHTILE_HOST_DEVICE float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1 / x;
#endif
}

/// Returns x / y for |y| ≤ 2^126. On a GPU it does without the subroutine that rounds the quotient correctly, since
/// callers compute the remainder.
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

/// Returns a − b · c, of which only what is left after the cancellation is rounded.
FLASHTILE_HOST_DEVICE float less_product(float a, float b, float c) {
  const float product = finite(b * c);
  return (a - product) - fmaf(b, c, -product);
}

/// A row is called steep if what its weights are relative to (a reference or an lse, in log2 units) is this large: too
/// large for one rounded float32. At half of it rounding changes a weight by a factor of 1 ± 2^-15.
inline constexpr float kSteep = 0x1p10f;

///  FinishedRow is the softmax of a finished row, with the unit of ScoreMap: a normalised weight is
///  2^((score − reference) · unit_log2 − log2_sum). A backward gets this rather than a log-sum-exp, as one float32 of
/// that would be off by units for large scores, next to which differences of scores, and log2_sum, are small.
struct FinishedRow {
  float reference = 0;          // a score
  float log2_sum = -kInfinity;  // −inf if the row saw nothing

  /// Makes a row of one float32, its natural lse. It is less exact than the row that had this lse.
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
  /// Returns ln Σ e^logit, or −inf for a row that saw nothing. A NaN among the scores makes it NaN.
  FLASHTILE_HOST_DEVICE float lse(float unit) const { return fmaf(reference, unit, log2_sum * kLn2); }
  /// Returns by how much a sink's logit exceeds the lse, in log2 units: the sink's weight is 2 to that power.
  FLASHTILE_HOST_DEVICE float above_lse_log2(float sink, float unit) const {
    return less_product(sink, reference, unit) * kLog2e - log2_sum;
  }
};

/// RowTotal is a row all of whose scores are counted, a sink among them:
/// sum = Σ 2^((score − reference) · unit_log2 − log2_scale).
struct RowTotal {
  float reference = 0;
  float log2_scale = 0;
  float sum = 0;
  float normaliser = 0;  // factor of the accumulated output; 0 for a row that saw nothing

  /// Takes a logarithm, which an inference does without, since it wants the normaliser alone.
  FLASHTILE_HOST_DEVICE FinishedRow finished() const {
    if (sum == 0) return {};
    return {reference, log2_scale + log2f(sum)};
  }
};

/// RowState is the softmax of a row in progress: sum = Σ 2^((score − reference) · unit_log2). The reference is any
/// finite number near the row's greatest score, or −inf if the row has seen nothing yet.
struct RowState {
  float reference = -kInfinity;
  float sum = 0;

  /// Moves to a new reference and returns the factor that rescales everything accumulated under the old one.
  FLASHTILE_HOST_DEVICE float rebase(float new_reference, float unit_log2) {
    const float factor = reference == new_reference ? 1.0f : exp2f((reference - new_reference) * unit_log2);
    reference = new_reference;
    sum *= factor;
    return factor;
  }

  /// Sums up the row when all its scores are counted. `sink` is one more logit, without a value; −inf is none.
  FLASHTILE_HOST_DEVICE RowTotal total(float sink, float unit) const {
    RowTotal row{reference, 0, sum, 1};
    if (sink != -kInfinity) {
      const float above = sum == 0 ? kInfinity : less_product(sink, reference, unit) * kLog2e;
      if (above <= 0) {
        row.sum += exp2f(above);
      } else {
        // The sink is the greatest logit: weights become relative to it. The reference is the sink in units of scores,
        // rounded, and log2_scale takes the remainder.
        const FinishedRow of_sink = FinishedRow::of_lse(sink, unit);
        const float factor = exp2f(-above);
        row = {of_sink.reference, of_sink.log2_sum, sum * factor + 1, factor};
      }
    }
    row.normaliser = row.sum == 0 ? 0.0f : row.normaliser * reciprocal(row.sum);
    return row;
  }
};

///  Merge has the weights of two partial results (out_a, lse_a) and (out_b, lse_b) over disjoint keys:
///  out = a · out_a + b · out_b, with the lse of the union.
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
