// Which blocks of keys a thread block of Hopper's backward kernel of one pass takes.
#pragma once

#include "flashtile/mainloop/backward_one_pass_sm90/storage.h"

namespace flashtile {

/// Hands out blocks. Where sums are in order, who waits for a block must know that somebody has it: so all are taken
/// in turn, where otherwise each thread block has its first one beforehand.
template <class Mainloop>
struct OnePassSchedulerSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;

  BackwardOnePassParams const& params;
  SharedStorage& shared;

  CUTE_DEVICE void run() {
    const bool in_order = params.backward.deterministic;
    const auto take = [&] { return (in_order ? 0 : int(gridDim.x)) + atomicAdd(params.backward.taken, 1); };
    Ring<1>::Cursor at{};
    int index = blockIdx.x;
    bool taken = !in_order;
    for (bool more = true; more; at.advance()) {
      shared.work_barriers.fill(at, [&] {
        if (!taken) index = take();
        more = shared.more = index < params.blocks && shared.work.find(params.backward, index);
        return 0;
      });
      // Nobody else can have what is taken; but a block that is soon done should not wait for the answer.
      taken = more && shared.work.steps() <= Mainloop::kStepsAhead;
      if (taken) index = take();
    }
  }
};

/// The blocks of keys that a thread block takes.
template <class Mainloop>
struct OnePassBlocksSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;
  using Work = typename Mainloop::Work;

  BackwardOnePassParams const& params;
  SharedStorage& shared;
  Work only;  // if it does not loop; found by all threads before registers are shared out, as a producer has few

  CUTE_DEVICE OnePassBlocksSm90(BackwardOnePassParams const& params, SharedStorage& shared)
      : params(params), shared(shared) {
    if constexpr (!Mainloop::kLoops) only = Work(params.backward, blockIdx.x);
  }

  /// Calls `visit(work, release)` for each, which calls `release()` when the next block may be handed out to this
  /// thread block.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit_and_release) const {
    const auto visit = [&](Work const& work) __attribute__((always_inline)) { visit_and_release(work, [] {}); };
    if constexpr (Mainloop::kTakes == Takes::kBlock) {
      visit(only);
    } else if constexpr (Mainloop::kTakes == Takes::kBlocks) {
      // Rounds alternate in direction: under a mask, who got the longest block of one gets the shortest of the next.
      int place = blockIdx.x;
      CUTE_NO_UNROLL
      for (int first = 0; first < params.blocks; first += gridDim.x) {
        if (first + place < params.blocks) visit(Work(params.backward, first + place));
        place = gridDim.x - 1 - place;
      }
    } else {
      CUTE_NO_UNROLL
      for (Ring<1>::Cursor at{};; at.advance()) {
        shared.work_barriers.wait_full(at);
        if (!shared.more) return;
        const Work work = shared.work;
        visit_and_release(work, [&] { shared.work_barriers.release_by_thread(at); });
      }
    }
  }
};

}  // namespace flashtile
