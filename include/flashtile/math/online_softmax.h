// Online softmax over score tiles that live in the registers of a warp.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/state.h"

namespace flashtile {

CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// An accumulator of m16n8 MMAs, (value, m, n), seen as (row, column) of one thread: two rows of each m16.
template <class Accumulator>
CUTE_DEVICE auto rows_and_columns(Accumulator&& acc) {
  using namespace cute;
  auto split = logical_divide(acc.layout(), Shape<_2>{});  // ((2, 2), m, n)
  return make_tensor(acc.data(), make_layout(make_layout(get<0, 1>(split), get<1>(split)),
                                             make_layout(get<0, 0>(split), get<2>(split))));
}

/// State of the rows that one thread shares with the other three of its quad. `sum` covers this thread's columns only
/// until finish().
///
/// The reference is lazy: it is raised only when a row outgrows it by 2^kSlack, so that almost no tile pays for
/// shuffles or for rescaling the output. Any reference gives the exact softmax; float32 holds the slack with ease.
template <int kRows>
struct OnlineSoftmax {
  static constexpr float kSlack = 8;

  RowState row[kRows];
  float scale_log2;  // from the scores' unit to log2

  CUTE_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {}

  /// Raises references to fit `scores` (row, column); `rescale(r, factor)` is told of every row that moves.
  template <class Scores, class Rescale>
  CUTE_DEVICE void fit(Scores const& scores, Rescale&& rescale) {
    using namespace cute;
    float top[kRows];
    bool outgrown = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      top[r] = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) top[r] = fmaxf(top[r], scores(r, c));
      outgrown |= top[r] * scale_log2 > row[r].reference_log2 + kSlack;
    }
    if (!__any_sync(0xffffffff, outgrown)) [[likely]]
      return;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 2));
      rescale(r, row[r].rebase(fmaxf(row[r].reference_log2, top[r] * scale_log2)));
    }
  }

  /// scores ← 2^(scores − reference), added to the row sums. Takes few columns at a time: their sum is added as one,
  /// so that the rounding of long rows stays small.
  template <class Scores>
  CUTE_DEVICE void exponentiate(Scores&& scores) {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      // A row that has seen nothing holds only −inf; any finite offset turns that into 0 rather than NaN.
      const float offset = row[r].reference_log2 == -kInfinity ? 0.0f : row[r].reference_log2;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), scale_log2, -offset));
      }
      float sum = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) sum += scores(r, c);
      row[r].sum += sum;
    }
  }

  /// Completes the row sums across the quad.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row[r].sum += __shfl_xor_sync(0xffffffff, row[r].sum, 1);
      row[r].sum += __shfl_xor_sync(0xffffffff, row[r].sum, 2);
    }
  }
};

}  // namespace flashtile
