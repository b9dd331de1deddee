// This file says which blocks of keys a thread block of Hopper's backward kernel of one pass takes.
#pragma once

#include "flashtile/mainloop/backward_one_pass_sm90/storage.h"

namespace flashtile {

/// One thread hands out blocks of keys. Each thread block has its first one beforehand, but not where sums are in
/// order: a thread block that waits for the sum of another block of keys relies on a running thread block having taken
/// that one, so there all are taken from the counter.
template <class Mainloop>
struct OnePassSchedulerSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;
  using Work = typename Mainloop::Work;

  BackwardOnePassParams const& params;
  SharedStorage& shared;

  CUTE_DEVICE void run() {
    const bool in_order = params.backward.deterministic;
    const auto take = [&] { return (in_order ? 0 : int(gridDim.x)) + atomicAdd(params.backward.taken, 1); };
    Ring<2>::Cursor at{};
    int index = blockIdx.x;
    bool taken = !in_order;
    for (unsigned asked = 0;; asked ^= 1) {
      Work& work = shared.work[at.stage];
      bool more = false;
      shared.work_barriers.fill(at, [&] {
        if (!taken) index = take();
        more = shared.more[at.stage] = index < params.blocks && work.find(params.backward, index);
        return 0;
      });
      if (!more) return;
      // No other thread block can have what is taken, so it is taken late. But a block that is soon done should not
      // wait for the counter's answer.
      taken = work.steps <= Mainloop::kStepsAhead;
      if (taken) index = take();
      shared.next_asked.wait(asked);
      at.advance();
    }
  }
};

/// OnePassBlocksSm90 are the blocks of keys that a thread block takes.
template <class Mainloop>
struct OnePassBlocksSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;
  using Work = typename Mainloop::Work;

  BackwardOnePassParams const& params;
  SharedStorage& shared;
  // This is the block of a thread block that takes only one. All threads find it before registers are given to the
  // consumers, as a producer has few.
  Work only;

  CUTE_DEVICE OnePassBlocksSm90(BackwardOnePassParams const& params, SharedStorage& shared)
      : params(params), shared(shared) {
    if constexpr (!Mainloop::kLoops) only = Work(params.backward, blockIdx.x);
  }

  /// Calls `visit(work, release)` for each. A role but the producer calls `release()` when it has done reading `work`.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit_and_release) const {
    const auto visit = [&](Work const& work) __attribute__((always_inline)) { visit_and_release(work, [] {}); };
    if constexpr (!Mainloop::kLoops) {
      // Each role finds the steps again: so these are in uniform registers, as the consumers are short of others.
      Work work = only;
      work.take_part(params.backward);
      visit(work);
    } else if constexpr (Mainloop::kTakes == Takes::kBlocks) {
      // Rounds alternate in direction: under a mask, the thread block that got the longest block of one gets the
      // shortest of the next.
      int place = blockIdx.x;
      CUTE_NO_UNROLL
      for (int first = 0; first < params.blocks; first += gridDim.x) {
        if (first + place < params.blocks) visit(Work(params.backward, first + place));
        place = gridDim.x - 1 - place;
      }
    } else {
      CUTE_NO_UNROLL
      for (Ring<2>::Cursor at{};; at.advance()) {
        shared.work_barriers.wait_full(at);
        if (!shared.more[at.stage]) return;
        visit_and_release(shared.work[at.stage], [&] { shared.work_barriers.release_by_thread(at); });
      }
    }
  }
};

}  // namespace flashtile
