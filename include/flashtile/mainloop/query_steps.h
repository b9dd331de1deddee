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
};

/// QuerySteps are those of a KeyBlock. Where sums of dQ are in order (deterministic), which not every kernel knows,
/// they go from the last query on; under a column mask they have the order of its words.
template <class Work, bool kKnowsOrderedDq>
class QuerySteps {
 public:
  CUTE_DEVICE QuerySteps(BackwardParams const& params, Work const& work) : params_(params), work_(work) {}

  CUTE_DEVICE QueryStep first() {
    QueryStep step{work_.first_head, work_.first_tile_of_head, work_.first_tile_of_head};
    if constexpr (Work::kMayMask) {
      ahead_ = {work_.words};
      if (work_.masked())
        for (int i = 0; i <= step.index; ++i) step.m_block = next_masked();
    }
    return step;
  }

  /// Returns the step after `step`, the last one that was returned. There has to be one.
  CUTE_DEVICE QueryStep after(QueryStep step) {
    step.index = work_.queries.next_around(step.index, backwards() ? -1 : 1);
    const bool new_head = step.index == (backwards() ? work_.queries.last() : work_.queries.first());
    if (new_head) ++step.head;
    step.m_block = step.index;
    if constexpr (Work::kMayMask) {
      if (work_.masked()) {
        if (new_head) ahead_ = {work_.words};
        step.m_block = next_masked();
      }
    }
    return step;
  }

 private:
  CUTE_DEVICE bool backwards() const { return kKnowsOrderedDq && params_.deterministic && !work_.masked(); }
  CUTE_DEVICE int next_masked() { return ahead_.next(params_.mask_tables.keys.words); }

  BackwardParams const& params_;
  Work const& work_;
  MaskedBlocks ahead_;  // under a column mask, the tiles of the head that are still to come
};

}  // namespace flashtile
