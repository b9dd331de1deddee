// This file finds the largest logit of each head in Hopper's forward kernel, where that is wanted.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/launch.h"
#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/math/head_packing.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/math/state.h"

namespace flashtile {

/// Consumers look at few scores: OnlineSoftmax says of most blocks, by their rounded weights, that they have no score
/// larger than the largest one so far. How many blocks it says that of depends on how good that bound is, and a warp
/// alone would take most of a sequence to find a good one. So all consumers of a tile keep the largest scores of its
/// heads in shared memory, and another warp exchanges these with the tiles of other thread blocks, through global
/// memory, whose latency no consumer sees. Where keys are split, consumers compare all scores, and raise the largest
/// logits of all only when a tile ends.
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

  /// Where keys are split: keeps the largest scores of the thread's rows in a block, and tells them when it has weighed
  /// all of a tile.
  template <class Scores>
  CUTE_DEVICE void keep(Scores const& scores) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) softmax.largest[r] = fmaxf(softmax.largest[r], softmax.top_of_row(scores, r));
  }
  CUTE_DEVICE void tell_kept() const {
    tell(softmax.largest[0], softmax.largest[1]);
    softmax.largest[0] = softmax.largest[1] = -kInfinity;
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

/// LargestLogitsExchange exchanges the largest scores of a tile with those of other thread blocks. It is a warp, of
/// which a lane has one of the tile's heads: one that does nothing else, until all of the tile is weighed, or, over
/// pages, that which loads values. In the second case, and where keys are split, consumers tell what they have found
/// when they have weighed all of a tile.
template <class Mainloop>
struct LargestLogitsExchange {
  using Work = typename Mainloop::Work;
  using Cursor = typename Ring<Mainloop::kWorks>::Cursor;

  ForwardParams const& params;
  typename Mainloop::SharedStorage& shared;

  /// The warp of its own exchanges those of tile after tile.
  CUTE_DEVICE void run() const {
    await_kernel_before();  // which sets the largest logits of all to −inf; no other warp needs them
    Cursor at{};
    while (true) {
      shared.work_barriers.wait_full(at);
      Work& work = shared.work[at.stage];
      if (work.keys.blocks < 0) return;
      // Rows behind the last sequence are of none, and see no key.
      if (work.keys.blocks > 0 && lane() < params.scores.packing.heads) exchange_until_weighed(work, at);
      shared.work_barriers.release_by_thread(at);
      at.advance();
    }
  }

  /// The warp that loads values calls it with each block, of which `before` others of the tile come before it. Most
  /// news comes at the beginning of a tile.
  CUTE_DEVICE void run_beside(Work& work, int before) const {
    constexpr int kLongestPause = 8;                         // blocks
    const bool at_beginning = (before & (before - 1)) == 0;  // 0 or a power of 2
    if ((!at_beginning && before % kLongestPause != 0) || lane() >= params.scores.packing.heads) return;
    await_kernel_before();  // as above
    int told = in_order(-kInfinity);
    exchange(work, told);
  }

  /// A warp of consumers calls it when it has weighed all of a tile, if no other does for all of them.
  CUTE_DEVICE void tell_all(Work const& work) const {
    if (lane() >= params.scores.packing.heads) return;
    const int here = read(work);
    if (here == in_order(-kInfinity)) return;
    await_kernel_before();  // as above
    raise(work, here);
  }

 private:
  // These are nanoseconds from one exchange to the next of the warp of its own, which takes its instructions from those
  // of consumers.
  static constexpr unsigned kFirstPause = 250, kLongestPause = 4000;

  CUTE_DEVICE static int lane() { return int(threadIdx.x % 32); }
  CUTE_DEVICE static int read(Work const& work) {
    return *static_cast<const volatile int*>(&work.more.largest[lane()]);
  }
  CUTE_DEVICE void raise(Work const& work, int order) const {
    params.rows.largest.raise(work.tile.batch, work.tile.head + lane(), from_order(order) * params.scores.map.unit);
  }

  CUTE_DEVICE void exchange_until_weighed(Work& work, Cursor at) const {
    int told = in_order(-kInfinity);
    for (unsigned pause = kFirstPause;; pause = min(2 * pause, kLongestPause)) {
      const bool is_over =
          wait_at_most(shared.weighed[at.stage], at.parity, pause);  // what is read after that is final
      exchange(work, told);
      if (is_over) return;
    }
  }

  /// Exchanges the largest score of the lane's head once. What has been told others already is `told`.
  CUTE_DEVICE void exchange(Work& work, int& told) const {
    // The score of a logit is rounded, so it counts as a little less; where it has none, nothing is known.
    const float of_all = params.rows.largest.so_far(work.tile.batch, work.tile.head + lane());
    const float score = quotient(of_all, params.scores.map.unit);
    const int known = in_order(score < kInfinity ? score - fabsf(score) * 0x1p-20f : -kInfinity);
    const int here = read(work);
    if (known > here) {
      atomicMax(&work.more.largest[lane()], known);
    } else if (here > known && here > told) {
      raise(work, here);
      told = here;
    }
  }
};

}  // namespace flashtile
