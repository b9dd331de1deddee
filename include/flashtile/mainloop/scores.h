// What happens to a tile of raw scores in registers before softmax: the score map, and the mask.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// The scores of the rows from `first_row` on. Tensors of scores are (row, column) of one thread, and `coord` holds
/// the place of each in the tile; the tile's columns begin at `first_column` of `lengths`.
struct ScoreTile {
  ForwardParams const& params;
  TileCoord tile;
  int first_row;
  Lengths lengths;

  /// An increasing linear score map is folded into the exponent; any other is applied by map().
  CUTE_DEVICE static bool folded(ForwardParams const& params) {
    return params.score_map.order_preserving() && params.alibi_slopes == nullptr;
  }

  /// 1 − 2 / (1 + e^2x). By the published errors of ex2 and of the division it is within 2^-21 of tanh; what matters of
  /// an exponent is its absolute error.
  CUTE_DEVICE static float tanh_of(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2 * kLog2e * x)); }

  /// Raw scores to exponents, by softcap, scale and ALiBi; select packs no heads where there are slopes.
  template <class Scores, class Coord>
  CUTE_DEVICE void map(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    const ScoreMap map = params.score_map;
    if (map.capped()) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of(map.inner * scores(i));
    }
    const float slope_log2 =
        params.alibi_slopes
            ? kLog2e *
                  params.alibi_slopes[tile.batch * params.alibi_batch_stride + tile.head * params.alibi_head_stride]
            : 0.0f;
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

  /// Hides what the band does not show of an edge tile.
  template <class Scores, class Coord>
  CUTE_DEVICE void mask(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    constexpr int kColumns = size<1>(decltype(scores.layout()){});
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const Range visible = params.band.columns(params.packing.query(first_row + get<0>(coord(r, 0))), lengths);
      const int first = first_column + get<1>(coord(r, 0));
      const int begin = columns_before(visible.begin - first);
      const int end = columns_before(visible.end - first);
      std::uint32_t shown = 0;  // of 32 columns, a bit each: testing one takes less than comparing with both ends
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        if (c % 32 == 0) shown = bits_below(end - c) & ~bits_below(begin - c);
        if (!(shown & (1u << c % 32))) scores(r, c) = -kInfinity;
      }
    }
  }

 private:
  /// Of a thread's columns 0, 1, 8, 9, 16, 17, …: how many are below `column`.
  CUTE_DEVICE static int columns_before(int column) { return 2 * (column >> 3) + min(column & 7, 2); }
  CUTE_DEVICE static std::uint32_t bits_below(int n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; }
};

}  // namespace flashtile
