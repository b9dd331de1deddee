// This file finds the largest logit of each head in Hopper's forward kernel, where that is wanted.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/epilogue/rows.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

struct NothingKnown {};

/// LargestLogits looks at few scores: OnlineSoftmax says of most blocks, by the sums of their weights, that they have
/// no score larger than the largest one so far. How many blocks it says that of depends on how good that bound is, so
/// tiles of one head tell each other, through memory, what they have found. It is of one thread, which shares two rows
/// of the tile with its quad; `row` is the first one's place in the tile.
template <class Mainloop>
struct LargestLogits {
  /// For the two rows, these are scores that the largest one of their head is at least: those of the largest logits
  /// that tiles have found so far, a little lower, as they are rounded. They are +inf for an idle row.
  struct Known {
    float of_rows[2];
  };

  ForwardParams const& params;
  typename Mainloop::Work const& work;
  OnlineSoftmax<2>& softmax;
  int row;

  /// Takes the references of a tile from the scores of its first block, and begins with what was known before.
  template <class Scores>
  CUTE_DEVICE void begin(Scores const& scores, Known const& known) const {
    softmax.begin(scores);
    if (softmax.begin_largest(known.of_rows)) tell(known);
    softmax.find_limits();
  }

  /// Looks for larger scores than before in a block whose sums may hold one.
  template <class Scores>
  CUTE_DEVICE void look(Scores const& scores) const {
    if (!softmax.has_larger(scores)) return;
    const Known others = known();
    softmax.raise_largest(scores);
    tell(others);
    softmax.know_largest(others.of_rows);
    softmax.find_limits();
  }

  /// Returns what is known now.
  CUTE_DEVICE Known known() const {
    const QueriesOfRows of_rows = queries();
    Known known;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      known.of_rows[r] = kInfinity;
      if (of_rows.query(r) >= work.sequence.q.used) continue;
      const float logit = params.rows.largest.so_far(work.tile.batch, work.tile.head + of_rows.head(r));
      const float score = quotient(logit, params.scores.map.unit);
      known.of_rows[r] = score - fabsf(score) * 0x1p-20f;
    }
    return known;
  }

 private:
  CUTE_DEVICE QueriesOfRows queries() const { return {params.scores.packing, work.tile.m_block * Mainloop::kM, row}; }

  /// Tells other tiles of scores that are larger than what is known of them. Where heads are not packed, all rows of a
  /// warp are of one head, and one thread tells of them all.
  CUTE_DEVICE void tell(Known const& known) const {
    const bool of_one_head = params.scores.packing.heads == 1;
    if (of_one_head) softmax.share_largest();
    const QueriesOfRows of_rows = queries();
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const bool tells = of_one_head ? threadIdx.x % 32 == 0 && r == 0 : threadIdx.x % 4 == 0;
      if (tells && known.of_rows[r] < softmax.largest[r])
        params.rows.largest.raise(work.tile.batch, work.tile.head + of_rows.head(r),
                                  softmax.largest[r] * params.scores.map.unit);
    }
  }
};

}  // namespace flashtile
