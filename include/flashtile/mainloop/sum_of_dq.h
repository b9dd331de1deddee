// Sums of several thread blocks in memory.
#pragma once

#include <cuda/atomic>

#include "flashtile/params.h"

namespace flashtile {

/// A part of a tile of dQ, to which all blocks of keys add that its queries see.
///
/// In order, blocks add from the first to the last, so that the rounding is the same in every run. Nobody waits for
/// ever: in that order blocks start, by a thread block's index or as they are asked for, and all walk from the last
/// query to the first. Under a causal mask all of them see the last: so those that run at a time are a step apart.
///
/// In any order, the first to come stores what others add to, which spares clearing the memory beforehand. The others
/// wait while it does. Ampere's kernel adds to zeros instead, and has a state only where sums are in order.
class SumOfDq {
 public:
  // The state: in order, the block of keys that comes next, or ~block where it shall store, not add. In any order:
  static constexpr int kNothing = 0, kBeingStored = 1, kThere = 2;

  CUTE_DEVICE SumOfDq(BackwardParams const& params, std::int64_t tile, int part)
      : state_(params.workspace.state(params.memory)[tile * params.workspace.parts + part]) {}

  CUTE_DEVICE bool ready(int n_block) const { return state() == n_block; }
  /// Waits for a block's turn. Returns whether it shall store, not add.
  CUTE_DEVICE bool await(int n_block) const {
    while (true) {
      const int state = this->state();
      if (state == n_block) return false;
      if (state == ~n_block) return true;
    }
  }
  /// By one thread, when all that was added is in memory.
  CUTE_DEVICE void pass(int n_block) const { state_.store(n_block + 1, cuda::memory_order_release); }

  /// In any order: whether there is something to add to.
  CUTE_DEVICE bool there() const { return state() == kThere; }
  /// Returns whether the caller is the first; if not, waits until there is.
  CUTE_DEVICE bool claim() const {
    int nothing = kNothing;
    if (state_.compare_exchange_strong(nothing, kBeingStored, cuda::memory_order_relaxed)) return true;
    while (state() != kThere) {
    }
    return false;
  }
  CUTE_DEVICE void announce() const { state_.store(kThere, cuda::memory_order_release); }

 private:
  CUTE_DEVICE int state() const { return state_.load(cuda::memory_order_acquire); }
  cuda::atomic_ref<int, cuda::thread_scope_device> state_;
};

}  // namespace flashtile
