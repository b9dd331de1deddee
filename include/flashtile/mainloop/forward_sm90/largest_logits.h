// This file finds the largest logit of each head in Hopper's forward kernel, where that is wanted.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/launch.h"
#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/math/head_packing.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/math/state.h"

namespace flashtile {

/// Consumers look at few scores: OnlineSoftmax says of most blocks, by the sums of their weights, that they have no
/// score larger than the largest one so far. How many blocks it says that of depends on how good that bound is, and a
/// warp alone would take most of a sequence to find a good one. So all consumers of a tile keep the largest scores of
/// its heads in shared memory, and one more warp exchanges these with the tiles of other thread blocks, through global
/// memory, whose latency no consumer sees.
///
/// LargestLogits is one thread of the consumers, which shares two rows of the tile with its quad; `row` is the first
/// one's place in the tile.
template <class Mainloop>
struct LargestLogits {
  ForwardParams const& params;
  typename Mainloop::SharedStorage& shared;
  typename Mainloop::Work& work;
  typename Mainloop::Softmax& softmax;
  int row;

  /// Tells the references that OnlineSoftmax::begin() has taken, the largest scores of a tile's first block. Where that
  /// is +inf, or all of a row's scores are NaN, the reference is kLargest. Then the weights are infinite or NaN, so
  /// that the block is weighed again, and look() sees which of the two it was.
  CUTE_DEVICE void tell_references() const {
    const auto top_of = [](float reference) { return reference < kLargest ? reference : -kInfinity; };
    tell(top_of(softmax.row[0].reference), top_of(softmax.row[1].reference));
  }

  /// Looks for larger scores than before in a block whose weights may show one. NaN is none.
  template <class Scores>
  CUTE_DEVICE void look(Scores const& scores) const {
    const auto top_of = [&](int r) { return fmaxf(softmax.top_of_row(scores, r), -kInfinity); };
    tell(top_of(0), top_of(1));
    find_limits();
  }

  /// Goes by what is known of the heads' largest scores in the blocks to come.
  CUTE_DEVICE void find_limits() const {
    if (work.more.has_one_head) {
      const float score = from_order(read(work.more.largest));
      softmax.find_limit(0, score);
      softmax.find_limit(1, score);
      return;
    }
    const Rows rows(*this);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float score = from_order(read(rows.of_head(r)));
      softmax.find_limit(r, rows.counts(r) ? score : kInfinity);
    }
  }

 private:
  /// These are the thread's rows where a tile has several heads, or rows that a pack of heads leaves idle: nothing is
  /// loaded into these, and their scores are of whatever lay there.
  struct Rows {
    QueriesOfRows of_rows;
    int end;
    int* largest;

    CUTE_DEVICE explicit Rows(LargestLogits const& of)
        : of_rows(of.params.scores.packing, of.work.tile.m_block * Mainloop::kM, of.row),
          end(min(of.work.sequence.q.used, of_rows.end)),
          largest(of.work.more.largest) {}
    CUTE_DEVICE bool counts(int r) const { return of_rows.query(r) < end; }
    CUTE_DEVICE int* of_head(int r) const { return largest + of_rows.head(r); }
  };

  CUTE_DEVICE static int read(const int* of_head) { return *static_cast<const volatile int*>(of_head); }

  /// Raises the largest scores of heads to these of the thread's rows. Where all rows are of one head, and none is
  /// idle, one lane raises it for all of its warp: shared memory takes atomic operations on one number one after the
  /// other. The other lanes raise numbers that nobody reads. If they did not, the warp would diverge, and in loops
  /// where it may, the compiler keeps nothing in uniform registers: each step would take a tenth longer.
  CUTE_DEVICE void tell(float first, float second) const {
    const int lane = int(threadIdx.x % 32);
    const auto raise_if = [&](bool raises, int* of_head, int top) {
      atomicMax(raises ? of_head : &shared.ignored[lane], top);
    };
    if (work.more.has_one_head)
      return raise_if(lane == 0, work.more.largest, __reduce_max_sync(0xffffffff, in_order(fmaxf(first, second))));
    const Rows rows(*this);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int top = in_order(r == 0 ? first : second), before = read(rows.of_head(r));
      raise_if(rows.counts(r) & (top > before), rows.of_head(r), top);
    }
  }
};

/// LargestLogitsExchange is the warp that exchanges the largest scores of the tile that consumers are at with those of
/// other thread blocks, over and over until all of it is weighed. A lane has one of the tile's heads.
template <class Mainloop>
struct LargestLogitsExchange {
  using Cursor = typename Ring<Mainloop::kWorks>::Cursor;

  ForwardParams const& params;
  typename Mainloop::SharedStorage& shared;

  CUTE_DEVICE void run() const {
    await_kernel_before();  // which sets the largest logits of all to −inf; no other warp needs them
    const int lane = int(threadIdx.x % 32);
    Cursor at{};
    while (true) {
      shared.work_barriers.wait_full(at);
      typename Mainloop::Work& work = shared.work[at.stage];
      if (work.keys.blocks < 0) return;
      // Rows behind the last sequence are of none, and see no key.
      if (work.keys.blocks > 0 && lane < params.scores.packing.heads)
        exchange(work.tile.batch, work.tile.head + lane, at, &work.more.largest[lane]);
      shared.work_barriers.release_by_thread(at);
      at.advance();
    }
  }

 private:
  // These are nanoseconds from one exchange to the next. Most news comes at the beginning of a tile, and the warp takes
  // its instructions from those of consumers.
  static constexpr unsigned kFirstPause = 250, kLongestPause = 4000;

  CUTE_DEVICE void exchange(int batch, int head, Cursor at, int* largest) const {
    LargestScores const& of_all = params.rows.largest;
    const float unit = params.scores.map.unit;
    int told = in_order(-kInfinity);
    for (unsigned pause = kFirstPause;; pause = min(2 * pause, kLongestPause)) {
      const bool is_over =
          wait_at_most(shared.weighed[at.stage], at.parity, pause);  // what is read after that is final
      // The score of a logit is rounded, so it counts as a little less; where it has none, nothing is known.
      const float score = quotient(of_all.so_far(batch, head), unit);
      const int known = in_order(score < kInfinity ? score - fabsf(score) * 0x1p-20f : -kInfinity);
      const int here = *static_cast<volatile int*>(largest);
      if (known > here) {
        atomicMax(largest, known);
      } else if (here > known && here > told) {
        of_all.raise(batch, head, from_order(here) * unit);
        told = here;
      }
      if (is_over) return;
    }
  }
};

}  // namespace flashtile
