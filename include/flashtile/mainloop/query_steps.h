// This file says which tile of queries comes next where a block of keys loads it a step ahead.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/key_block.h"

namespace flashtile {

/// A step is one of the tiles of queries that see a key: see GroupWalk. `index` is its place in the walk of its head,
/// which is the tile's number, but under a column mask.
struct QueryStep {
  int head;
  int index;
  int m_block;
  bool edge;  // of the mask
};

/// QuerySteps are those of a KeyBlock.
template <class Work>
class QuerySteps {
 public:
  CUTE_DEVICE QuerySteps(BackwardParams const& params, Work const& work) : params_(params), work_(work) {}

  CUTE_DEVICE QueryStep first() {
    QueryStep step = at(work_.first_head, work_.first_tile_of_head);
    if constexpr (Work::kMayMask) {
      if (work_.masked()) {
        ahead_ = work_.tiles_of_head(params_);
        for (int i = 0; i <= step.index; ++i) take_masked(step);
      }
    }
    return step;
  }

  /// Returns the step after `step`, the last one that was returned. There has to be one.
  CUTE_DEVICE QueryStep after(QueryStep step) {
    QueryStep next = step;
    work_.advance_step(next.head, next.index);
    if constexpr (Work::kMayMask) {
      if (work_.masked()) {
        if (work_.goes_by_tiles() && next.index == step.index) return next;  // the same tile of another head
        if (next.index == 0) ahead_ = work_.tiles_of_head(params_);
        take_masked(next);
        return next;
      }
    }
    return at(next.head, next.index);
  }

 private:
  CUTE_DEVICE QueryStep at(int head, int index) const { return {head, index, index, work_.queries.is_edge(index)}; }
  CUTE_DEVICE void take_masked(QueryStep& step) {
    const auto tile = work_.next(ahead_, params_);
    step.m_block = tile.index;
    step.edge = tile.edge;
  }

  BackwardParams const& params_;
  Work const& work_;
  MaskedBlocksAround ahead_;  // under a column mask, the tiles of the head that are still to come
};

}  // namespace flashtile
