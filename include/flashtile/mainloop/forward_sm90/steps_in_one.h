// This file says which blocks of Hopper's forward kernel are mapped and weighed in one pass over their scores.
#pragma once

#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// StepsInOne finds runs of steps whose scores are mapped (softcap, ALiBi) and weighed in one pass over them, which
/// spares an operation and the way through the registers: those of interior blocks that are mapped once. With ALiBi all
/// of their keys are on the same side of the diagonal. Where a tile has few blocks, one loop serves them all, as there
/// the code of another takes longer to come than it saves. All warps of a warpgroup, which share matmuls, get the same.
template <class Mainloop>
struct StepsInOne {
  static constexpr int kM = Mainloop::kM, kN = Mainloop::kN;

  ForwardParams const& params;
  typename Mainloop::Work const& work;
  BlockWalk const& walk;
  bool drops;  // whether the call has dropout

  /// Returns the end of the run of steps from `step` on, or `step` if its scores are not mapped in one pass.
  CUTE_DEVICE int end(int step) const {
    constexpr int kFewBlocks = 8;
    ScoreMap const& map = params.scores.map;
    const int n_block = work.keys.visited(step);
    if (map.capped == map.stretched || drops || walk.is_edge(n_block) || walk.blocks() < kFewBlocks) return step;
    if (Mainloop::kFindsLargest) return step;  // which looks at scores, not at exponents
    if (map.capped) return map.near > 0 ? walk.interior.end : step;
    if (!Mainloop::kStretchesInOne) return step;
    const int end = behind_origin(n_block) ? walk.interior.end : min((origin_of(0) + 1) / kN, walk.interior.end);
    return max(min(step + end - n_block, walk.end()), step);
  }

  /// Returns whether no key of a block is before the one from which ALiBi counts the distances of any row of the tile.
  CUTE_DEVICE bool behind_origin(int n_block) const { return n_block * kN >= origin_of(kM - 1); }

 private:
  CUTE_DEVICE int origin_of(int row) const {
    return params.scores.mask.origin(work.tile.m_block * kM + row, work.keys.lengths);
  }
};

}  // namespace flashtile
