// What happens to a tile of raw scores in registers before softmax: the score map, and the mask.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// An increasing linear score map is folded into the exponent; any other is applied by ScoreTile::map().
template <class Params>
CUTE_DEVICE bool folds(Params const& params) {
  return params.score_map.order_preserving() && params.alibi_slopes == nullptr;
}

/// Calls `visit(c, values)` with what `of_columns`, one float per column of the tile, holds for columns c and c + 1 of
/// a thread.
template <class Coord, class Visit>
CUTE_DEVICE void for_column_pairs(Coord const& coord, const float* of_columns, Visit&& visit) {
  using namespace cute;
  CUTE_UNROLL
  for (int c = 0; c < size<1>(coord); c += 2)
    visit(c, *reinterpret_cast<const float2*>(of_columns + get<1>(coord(0, c))));
}

/// The scores of the rows from `first_row` on. Tensors of scores are (row, column) of one thread, and `coord` holds
/// the place of each in the tile; the tile's columns begin at `first_column` of `lengths`.
template <class Params>
struct ScoreTile {
  Params const& params;
  TileCoord tile;
  int first_row;
  Lengths lengths;

  /// 1 − 2 / (1 + e^2x). By the published errors of ex2 and of the division it is within 2^-21 of tanh; what matters of
  /// an exponent is its absolute error.
  CUTE_DEVICE static float tanh_of(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2 * kLog2e * x)); }

  /// Raw scores to exponents.
  template <class Scores, class Coord>
  CUTE_DEVICE void map(Scores& scores, Coord const& coord, int first_column) const {
    cap(scores);
    stretch(scores, coord, first_column);
  }

  /// The first half of map(): the tanh of softcap, if there is one.
  template <class Scores>
  CUTE_DEVICE void cap(Scores& scores) const {
    using namespace cute;
    const ScoreMap map = params.score_map;
    if (map.capped()) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of(map.inner * scores(i));
    }
  }

  /// The second half: the scale, and ALiBi; select packs no heads where there are slopes.
  template <class Scores, class Coord>
  CUTE_DEVICE void stretch(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    const ScoreMap map = params.score_map;
    const float slope_log2 = this->slope_log2();
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const int to_diagonal = first_column - lengths.diagonal(first_row + get<0>(coord(r, 0)));
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        const float distance = fabsf(float(to_diagonal + get<1>(coord(r, c))));
        scores(r, c) = map.outer_log2 * scores(r, c) - slope_log2 * distance;
      }
    }
  }

  /// Of the exponent that map() made at `place` of the tile under a cap: what the cap's derivative is.
  template <class Coord>
  CUTE_DEVICE float cap_slope(float exponent, Coord const& place, int first_column) const {
    using namespace cute;
    const float distance = fabsf(float(first_column + get<1>(place) - lengths.diagonal(first_row + get<0>(place))));
    const float tanh = __fdividef(exponent + slope_log2() * distance, params.score_map.outer_log2);
    return exponent == -kInfinity ? 0.0f : 1.0f - tanh * tanh;
  }

  /// Hides what the band does not show of an edge tile. A thread holds two columns of every kColumnStep.
  template <int kColumnStep = 8, class Scores, class Coord>
  CUTE_DEVICE void mask(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    constexpr int kColumns = size<1>(decltype(scores.layout()){});
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const Range visible = params.band.columns(params.packing.query(first_row + get<0>(coord(r, 0))), lengths);
      const int first = first_column + get<1>(coord(r, 0));
      const int begin = columns_before<kColumnStep>(visible.begin - first);
      const int end = columns_before<kColumnStep>(visible.end - first);
      std::uint32_t shown = 0;  // of 32 columns, a bit each: testing one takes less than comparing with both ends
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        if (c % 32 == 0) shown = bits_below(end - c) & ~bits_below(begin - c);
        if (!(shown & (1u << c % 32))) scores(r, c) = -kInfinity;
      }
    }
  }

 private:
  CUTE_DEVICE float slope_log2() const {
    if (params.alibi_slopes == nullptr) return 0;
    return kLog2e * params.alibi_slopes[tile.batch * params.alibi_batch_stride + tile.head * params.alibi_head_stride];
  }

  /// Of a thread's columns 0, 1, 8, 9, 16, 17, … with a step of 8: how many are below `column`.
  template <int kColumnStep>
  CUTE_DEVICE static int columns_before(int column) {
    static_assert((kColumnStep & (kColumnStep - 1)) == 0);  // so that negative columns round down
    constexpr int kLog2 = kColumnStep == 8 ? 3 : kColumnStep == 16 ? 4 : 5;
    static_assert(1 << kLog2 == kColumnStep);
    return 2 * (column >> kLog2) + min(column & (kColumnStep - 1), 2);
  }
  CUTE_DEVICE static std::uint32_t bits_below(int n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; }
};

}  // namespace flashtile
