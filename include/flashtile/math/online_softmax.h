// This file has the online softmax over score tiles that live in the registers of a warp.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/round.h"
#include "flashtile/math/state.h"

namespace flashtile {

CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Returns the smaller one, or NaN if either is NaN.
CUTE_DEVICE float min_or_nan(float x, float y) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
  return smaller;
}

/// Returns integers that are in the order of floats, which atomic operations compare, and the float of such an integer.
/// The bits of negative floats are in the reverse order of their magnitudes.
CUTE_DEVICE int in_order(float x) {
  const int bits = __float_as_int(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
CUTE_DEVICE float from_order(int x) {
  return __int_as_float(x ^ ((x >> 31) & 0x7fffffff));
}

/// Views an accumulator (value, m, n) as (row, column) of one thread: two rows of each m16 (mma.sync) or m64 (wgmma).
template <class Accumulator>
CUTE_DEVICE auto rows_and_columns(Accumulator&& acc) {
  using namespace cute;
  auto l = acc.layout();
  if constexpr (decltype(rank<0>(l))::value == 3) {  // wgmma: ((2, 2, n / 8), m, 1)
    return make_tensor(acc.data(), make_layout(make_layout(get<0, 1>(l), get<1>(l)),
                                               make_layout(get<0, 0>(l), get<0, 2>(l), get<2>(l))));
  } else {
    auto split = logical_divide(l, Shape<_2>{});  // ((2, 2), m, n)
    return make_tensor(acc.data(), make_layout(make_layout(get<0, 1>(split), get<1>(split)),
                                               make_layout(get<0, 0>(split), get<2>(split))));
  }
}

/// Multiplies each row of `rows` (row, column) with factor[row].
template <class Rows, class Factors>
CUTE_DEVICE void scale_rows(Rows&& rows, Factors const& factor) {
  using namespace cute;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(rows); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(rows); ++c) rows(r, c) *= factor[r];
  }
}

/// The lanes that share a row differ in these bits of their numbers: the four of a quad, which have its columns in
/// turn, or, where rows and columns of a matmul are exchanged, eight of different quads.
enum class Sharers : int { kQuad = 3, kOfQuads = 28 };

/// OnlineSoftmax is the state of the rows that one thread shares with some others of its warp. Until finish_sums(),
/// `sum` covers this thread's columns only. A score's weight is 2^((score − reference) · unit_log2): the reference
/// stands where the textbook has the running maximum.
///
/// Any reference gives the exact softmax as long as no weight overflows, so it is raised lazily, in one of two ways:
///
///   fit, exponentiate: fit() takes the maximum of every tile, but raises the reference only when a row outgrows it:
///   when a weight would exceed 2^kSlack. So almost no tile pays for shuffles or for rescaling the output.
///
///   begin, weigh, outgrown, raise: begin() takes the maximum of the first tile alone. That a later score outgrows it
///   shows in the sums of the weights, which are needed anyway. The scores are still there then: raise() takes their
///   maximum, and the tile's weights are computed once more.
///
/// An exponent is one FMA, score · unit_log2 − offset, whose offset is the reference in log2 units, rounded. Where the
/// row is steep (see kSteep), that rounding would cost too much: its scores first have the reference subtracted,
/// exactly, and the offset is 0. Few inputs have steep rows, so these have code of their own: fit() asks whether there
/// are any, and weigh() lets them outgrow their reference in every tile.
///
/// Where the largest of all scores is wanted, Weight is the type of rounded weights, of 16 bits. Then find_limit() lets
/// outgrown() also say which blocks may have a larger one than those before: those with a rounded weight that is not
/// below that of the largest one. The bits of weights are in the order of integers, of which an instruction takes the
/// largest of three pairs.
template <int kRows, Sharers kSharers = Sharers::kQuad, class Weight = void>
struct OnlineSoftmax {
  static constexpr int kRowCount = kRows;
  static constexpr float kSlack = 8;
  static constexpr bool kFindsLargest = !std::is_void_v<Weight>;

  /// Sums are those of the weights of a block in this thread's columns, by row. Where the largest score is wanted,
  /// `most` has the limit, or what is more: the largest rounded weights of even and of odd columns.
  struct Sums {
    float of_row[kRows];
    std::uint32_t most[kRows];
  };

  RowState row[kRows];
  float unit_log2;             // log2 units of one unit of scores: see ScoreMap
  float offset[kRows]{};       // for weigh(): what it subtracts where relate() has not seen the scores
  bool steep = false;          // for fit(): whether any row of the warp is steep
  float largest[kRows];        // for fit(): the thread's largest score so far
  std::uint32_t limit[kRows];  // for outgrown(): the bits, twice, of a rounded weight that needs no further look

  CUTE_DEVICE explicit OnlineSoftmax(float unit_log2) : unit_log2(unit_log2) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) largest[r] = -kInfinity;
  }

  /// Takes the row maxima of a tile's first block of scores as references, and forgets the limits.
  template <class Scores>
  CUTE_DEVICE void begin(Scores const& scores) {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row[r] = {reference_for(top_of_sharers(top_of_row(scores, r))), 0};
      if constexpr (kFindsLargest) limit[r] = round_pair<Weight>(kLimit, kLimit);
    }
    find_offsets();
  }

  /// Raises the references that `scores` (row, column) outgrow, in steep rows all that a score exceeds, and subtracts
  /// them from the scores of steep rows. If any row of the warp is raised or steep, sets the factors that rescale what
  /// was accumulated so far, and returns true in all threads of the warp. The outcome for a row depends on that row
  /// alone.
  template <class Scores>
  CUTE_DEVICE bool fit(Scores& scores, float (&factor)[kRows]) {
    using namespace cute;
    bool outgrown = false;
    float top[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      top[r] = top_of_row(scores, r);
      largest[r] = fmaxf(largest[r], top[r]);
      outgrown |= (top[r] - row[r].reference) * unit_log2 > kSlack;
    }
    if (!__any_sync(0xffffffff, outgrown | steep)) [[likely]]
      return false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float reference = reference_for(top_of_sharers(top[r]));
      const bool raised = (reference - row[r].reference) * unit_log2 > (is_steep(r) ? 0.0f : kSlack);
      factor[r] = raised ? row[r].rebase(reference, unit_log2) : 1.0f;
    }
    bool any = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) any |= is_steep(r);
    steep = __any_sync(0xffffffff, any);
    if (steep) [[unlikely]]
      relate(scores);
    return true;
  }

  /// Raises the reference of each row that outgrew it with the sums `added` to its largest score. Sets the factors that
  /// rescale what was accumulated so far. The outcome for a row depends on that row alone: others keep their reference,
  /// also if a score exceeds it, and so their weights, bit for bit.
  template <class Scores>
  CUTE_DEVICE void raise(Scores const& scores, Sums const& added, float (&factor)[kRows]) {
    static_assert(kSharers == Sharers::kQuad);
    const unsigned first_of_quad = threadIdx.x % 32 & ~3u;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float top = fmaxf(row[r].reference, reference_for(top_of_sharers(top_of_row(scores, r))));
      const bool raised = __ballot_sync(0xffffffff, too_large(added.of_row[r])) >> first_of_quad & 0xf;
      factor[r] = raised ? row[r].rebase(top, unit_log2) : 1.0f;
    }
    find_offsets();
  }

  /// Sets the limit of a row to the number below the rounded weight of a score: weights above it may be of larger ones.
  /// It is called after that score, or the reference, has changed. The weight is taken to be a little less than it is,
  /// as exp2_approx need not be monotonic. The numbers below that of 0 are negative halves, which all weights exceed.
  CUTE_DEVICE void find_limit(int r, float score) {
    const float weight = exp2_approx(fmaf(score, unit_log2, -offset[r]));
    const float least = fminf(weight * (1 - 0x1p-16f), kLimit);
    limit[r] = round_pair<Weight>(least, least) - 0x00010001u;
  }

  /// Returns the largest of the thread's scores in a row.
  template <class Scores>
  CUTE_DEVICE static float top_of_row(Scores const& scores, int r) {
    float top = scores(r, 0);
    CUTE_UNROLL
    for (int c = 1; c < cute::size<1>(scores); ++c) top = fmaxf(top, scores(r, c));
    return top;
  }

  /// Returns the largest score of a row so far, in all threads that share it.
  CUTE_DEVICE float largest_of_row(int r) const { return top_of_sharers(largest[r]); }

  /// Subtracts the reference from the scores of steep rows, none of which exceeds it. A score of +inf, which Q·K has
  /// beyond float32's range, counts as the largest one.
  template <class Scores>
  CUTE_DEVICE void relate(Scores&& scores) const {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float reference = is_steep(r) ? row[r].reference : 0.0f;
      const float largest = is_steep(r) ? 0.0f : kInfinity;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) scores(r, c) = min_or_nan(scores(r, c) - reference, largest);
    }
  }

  /// Turns `scores`, as fit() has left them, into weights and adds these to the row sums. Callers pass few columns at a
  /// time: their sum is added as one number, so that the rounding of long rows stays small.
  template <class Scores>
  CUTE_DEVICE void exponentiate(Scores&& scores) {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float offset = offset_of_related(r);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) scores(r, c) = exp2_approx(fmaf(scores(r, c), unit_log2, -offset));
      float sum = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) sum += scores(r, c);
      row[r].sum += sum;
    }
  }

  /// Sets `weights` to the rounded weights of `scores`, and `added` to their sums by row before rounding. `related`
  /// says whether relate() has seen the scores. These are wgmma accumulators ((2, 2, n / 8), 1, 1) and stay as they
  /// are; `weights` are in the same order.
  template <class Scores, class Weights>
  CUTE_DEVICE void weigh(Scores const& scores, Weights&& weights, Sums& added, bool related) const {
    if constexpr (kFindsLargest) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) added.most[r] = limit[r];
    }
    const auto exponents = [&](int i, float& a, float& b) {
      const float less = offset_of(i % 2, related);
      a = fmaf(a, unit_log2, -less);
      b = fmaf(b, unit_log2, -less);
    };
    weigh_by(exponents, scores, weights, added);
  }

  /// Does the same with exponents that are not yet scores times unit_log2 less an offset: `exponents(i, a, b)` makes a
  /// and b, the two scores of word i of `weights`, which are of row i % 2 of the thread, exponents.
  template <class Exponents, class Scores, class Weights>
  CUTE_DEVICE static void weigh_by(Exponents&& exponents, Scores const& scores, Weights&& weights, Sums& added) {
    using namespace cute;
    using Element = typename std::decay_t<Weights>::value_type;
    static_assert(kRows == 2);
    auto words = recast<std::uint32_t>(weights);
    constexpr int kWords = size(decltype(words.layout()){});
    static_assert(!kFindsLargest || kWords % 4 == 0);
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      const int r = i % 2;
      float a = scores(2 * i), b = scores(2 * i + 1);
      exponents(i, a, b);
      a = exp2_approx(a);
      b = exp2_approx(b);
      float& sum = added.of_row[r];
      sum = i < 2 ? a + b : sum + a + b;
      words(i) = round_pair<Element>(a, b);
      if constexpr (kFindsLargest) {  // a chain of comparisons, which a tree was slower than (docs/performance.md)
        if (i % 4 >= 2) added.most[r] = __vimax3_s16x2(added.most[r], words(i - 2), words(i));
      }
    }
  }

  /// Returns whether, in any thread of the warp, `outgrown` is given, sums of weights show that a score has outgrown
  /// the reference, or a weight is above its limit: then a score may be larger than that of find_limit(). A row without
  /// a reference so far has infinite weights, a steep row infinite ones or NaN.
  CUTE_DEVICE bool outgrown(Sums const& added, bool outgrown = false) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kFindsLargest) outgrown |= added.most[r] != limit[r];
    }
    return outgrown_reference(added, outgrown);
  }

  /// Returns whether, in any thread of the warp, `outgrown` is given or sums of weights show that a score has outgrown
  /// the reference.
  CUTE_DEVICE bool outgrown_reference(Sums const& added, bool outgrown = false) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) outgrown |= too_large(added.of_row[r]);
    return __any_sync(0xffffffff, outgrown);
  }

  /// Completes the row sums.
  CUTE_DEVICE void finish_sums() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int bit = 1; bit < 32; bit *= 2)
        if (int(kSharers) & bit) row[r].sum += __shfl_xor_sync(0xffffffff, row[r].sum, bit);
    }
  }

  /// Returns what is subtracted from the scores of a row, times unit_log2, to make exponents; `related` says whether
  /// relate() has seen them.
  CUTE_DEVICE float offset_of(int r, bool related) const { return related ? offset_of_related(r) : offset[r]; }

 private:
  // float16 holds this; bfloat16 could hold far more, but the rounding of exponents grows with the distance to the
  // reference.
  static constexpr float kLimit = 0x1p15f;

  CUTE_DEVICE static bool too_large(float sum) { return !(sum <= kLimit); }
  CUTE_DEVICE float reference_log2(int r) const { return row[r].reference * unit_log2; }
  CUTE_DEVICE bool is_steep(int r) const {
    return fabsf(reference_log2(r)) >= kSteep && row[r].reference != -kInfinity;
  }
  /// Returns what is subtracted from scores that relate() has seen. A row that has seen nothing holds scores of −inf
  /// alone, whose weights are 0 by any finite offset.
  CUTE_DEVICE float offset_of_related(int r) const {
    return fabsf(reference_log2(r)) >= kSteep ? 0.0f : reference_log2(r);
  }
  /// Sets the offsets of scores that relate() has not seen. That of a row that has seen nothing gives its first visible
  /// scores infinite weights, and −inf gives a steep row's infinite ones or NaN: so both outgrow their reference.
  CUTE_DEVICE void find_offsets() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) offset[r] = is_steep(r) ? -kInfinity : fmaxf(reference_log2(r), -kLargest);
  }
  CUTE_DEVICE static float reference_for(float top) { return fminf(top, kLargest); }
  CUTE_DEVICE static float top_of_sharers(float top) {
    CUTE_UNROLL
    for (int bit = 1; bit < 32; bit *= 2)
      if (int(kSharers) & bit) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, bit));
    return top;
  }
};

}  // namespace flashtile
