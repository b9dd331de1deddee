// This file hides keys of a block from Hopper's forward kernel: by the band, and by column masks.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/forward_sm90/last_hidden.h"
#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/mainloop/scores.h"

namespace flashtile {

/// BlockMask is what one thread of the consumers knows of the mask of a block. It looks at a column mask before the
/// step waits for its scores, so that the matmul hides the time that this takes.
template <class Mainloop>
class BlockMask {
  using Work = typename Mainloop::Work;
  using SharedStorage = typename Mainloop::SharedStorage;
  static constexpr int kN = Mainloop::kN;

 public:
  CUTE_DEVICE BlockMask(ForwardParams const& params, SharedStorage& shared) : params(params), shared(shared) {}

  /// Finds what a column mask hides of the block of a step, if it is at an edge, and under a mask of all keys which
  /// block that is. K of the block is in the stage `k_stage`; `first_row` is the first one of the thread's warp,
  /// counted among those of the head.
  template <bool kMayBeEdge>
  CUTE_DEVICE void look_at(Work const& work, BlockWalk const& walk, int step, int k_stage, int first_row) {
    if constexpr (Mainloop::kLastMasked) {
      if (kMayBeEdge && walk.is_edge(work.keys.visited(step)))
        hidden.find(work.more, params.scores, work.sequence.lengths(), Mainloop::key_of_step(work, step), first_row);
    }
    if constexpr (Mainloop::kMasked) {
      first_key = shared.first_key[k_stage];
      if (!kMayBeEdge || !walk.is_edge(step)) return;
      shared.columns_barriers.wait_full(columns_at);
      hidden.find(shared.columns[columns_at.stage], kN, first_row);
      shared.columns_barriers.release_by_warp(columns_at);
      columns_at.advance();
    }
  }

  /// Returns the key of the block's first column.
  CUTE_DEVICE int first_column(int n_block) const { return Mainloop::kMasked ? first_key : n_block * kN; }

  /// Hides keys of an edge block from its scores.
  template <class Scores, class Coord>
  CUTE_DEVICE void hide(Work const& work, ScoreTile<HeadPacking> const& tile, Scores& scores, Coord const& coord,
                        int n_block) const {
    if constexpr (Mainloop::kLastMasked) {
      hidden.hide(scores);  // also what the band hides, and keys behind the last one: see LastHidden
    } else if constexpr (Mainloop::kMasked) {
      hidden.hide(scores);
      const bool ends = first_key + kN > work.keys.lengths.k;  // keys behind the last one are hidden, too
      if (banded || ends) [[unlikely]]
        tile.mask(scores, coord, first_key);
    } else {
      tile.mask(scores, coord, n_block * kN);
    }
  }

  /// Returns the first key of the block, counted among all keys.
  CUTE_DEVICE int key(Work const& work, int step) const {
    return Mainloop::kMasked ? first_key : Mainloop::key_of_step(work, step);
  }

 private:
  ForwardParams const& params;
  SharedStorage& shared;
  // These are under a column mask of all keys: the first key of the current block, and whether the band, too, hides
  // something.
  int first_key = 0;
  typename Ring<Mainloop::kColumnStages>::Cursor columns_at{};
  const bool banded = Mainloop::kMasked && !params.scores.mask.shows_all();
  // Of both kinds of masks it is what they hide of the block at an edge, of that of the last keys together with the
  // band.
  [[no_unique_address]] std::conditional_t<Mainloop::kMasked, HiddenBits<kN>,
                                           std::conditional_t<Mainloop::kLastMasked, LastHidden<kN>, NothingHidden>>
      hidden;
};

}  // namespace flashtile
