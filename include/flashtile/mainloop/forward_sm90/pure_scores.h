// This file turns raw scores into scores in batch-invariant calls on Hopper.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/scores.h"

namespace flashtile {

/// PureScoreTile is a ScoreTile whose map of a score depends on that score alone: ScoreTile::cap() asks whether all
/// scores of a warp are near 0, and this one asks each that is not among such.
template <class Packing>
struct PureScoreTile : ScoreTile<Packing> {
  using Base = ScoreTile<Packing>;

  template <class Scores, class Coord>
  CUTE_DEVICE void map(Scores& scores, Coord const& coord, int first_column) const {
    if (this->params.map.capped && !this->cap_near(scores)) cap_each(scores);
    if (this->params.map.stretched) this->stretch(scores, coord, first_column);
  }

 private:
  template <class Scores>
  CUTE_DEVICE void cap_each(Scores& scores) const {
    using namespace cute;
    ScoreMap const& map = this->params.map;
    constexpr int kQuarter = size<1>(decltype(scores.layout()){}) / 4;
    for_columns_in_turn<kQuarter>(scores, [&](int) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        CUTE_UNROLL
        for (int c = 0; c < kQuarter; ++c) {
          const float raw = scores(r, c);
          float near[] = {raw};
          map.tanh_near(near);
          const float far = Base::template tanh_of<Softcaps::kUsual>(map.inner * raw);
          scores(r, c) = fabsf(raw) <= map.near ? near[0] : far;
        }
      }
    });
  }
};

}  // namespace flashtile
