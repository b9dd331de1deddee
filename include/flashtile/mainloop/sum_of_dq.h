// This file adds up in memory what several thread blocks contribute to dQ.
#pragma once

#include <cuda/atomic>

#include "flashtile/params.h"

namespace flashtile {

/// SumOfDq is a part of a tile of dQ, what one warp (Hopper: one warpgroup) adds: all blocks of keys that its queries
/// see add to it.
///
/// In order (deterministic), blocks add from the first to the last, each in its turn (see KeyBlock::turn()), so that
/// the rounding is the same in every run. No thread block waits for ever: in that order blocks start, by a thread
/// block's index or as they are asked for, each with all of its parts (see KeyBlock), so the first that is not yet done
/// waits for none. All go from the last query to the first, but under a column mask. Under a causal mask all of them
/// see the last: so those that run at a time are a step apart.
///
/// In any order, the first to come stores what others add to, which spares clearing the memory; the others wait while
/// it does. Tiles are cleared where they are few, or where many blocks add to each (see BackwardPlan), and so are all
/// of Ampere's, whose kernel has a state for sums in order only.
class SumOfDq {
 public:
  // In order, the state is whose turn comes next, or ~turn if that block shall store, not add. In any order it is one
  // of these. Either way it is positive once a block has stored, or zeros have.
  static constexpr int kNothing = 0, kBeingStored = 1, kThere = 2;

  CUTE_DEVICE SumOfDq(BackwardParams const& params, std::int64_t tile, int part)
      : state_(params.workspace.state(params.memory)[tile * params.workspace.parts + part]) {}

  /// Returns, in a later kernel, whether a block has stored. None has where the queries see no key.
  CUTE_DEVICE bool stored() const { return state_.load(cuda::memory_order_relaxed) > 0; }

  CUTE_DEVICE bool ready(int turn) const { return state() == turn; }
  /// Waits for a block's turn: until the block before it has passed. Returns whether it shall store, not add.
  CUTE_DEVICE bool await(int turn) const {
    while (true) {
      const int state = this->state();
      if (state == turn) return false;
      if (state == ~turn) return true;
    }
  }
  /// One thread calls it when all that the block added is in memory, for the next block to add.
  CUTE_DEVICE void pass(int turn) const { state_.store(turn + 1, cuda::memory_order_release); }

  /// Returns, in any order, whether there is something to add to.
  CUTE_DEVICE bool there() const { return state() == kThere; }
  /// Returns whether the caller is the first, which has to store; if not, waits until there is something to add to.
  CUTE_DEVICE bool claim() const {
    int nothing = kNothing;
    if (state_.compare_exchange_strong(nothing, kBeingStored, cuda::memory_order_relaxed)) return true;
    while (state() != kThere) {
    }
    return false;
  }
  /// The first calls it when what it stored is in memory, for the others to add.
  CUTE_DEVICE void announce() const { state_.store(kThere, cuda::memory_order_release); }

 private:
  CUTE_DEVICE int state() const { return state_.load(cuda::memory_order_acquire); }
  cuda::atomic_ref<int, cuda::thread_scope_device> state_;
};

}  // namespace flashtile
