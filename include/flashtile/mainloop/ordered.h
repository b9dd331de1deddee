// Sums of several thread blocks in one order.
#pragma once

#include <cuda/atomic>

#include "flashtile/params.h"

namespace flashtile {

/// A part of a tile of dQ, to which the blocks of keys add one after the other, from the last that its queries see to
/// the first: so its rounding is the same in every run.
///
/// Nobody waits for ever: blocks start in the order in which they add (see KeyBlock), and all walk over the queries in
/// one direction. Under a causal mask they need not wait at all: block n comes to a tile a step after block n + 1.
class Ordered {
 public:
  /// Whether there is an order at all.
  CUTE_DEVICE static bool wanted(BackwardParams const& params) { return params.workspace.parts != 0; }

  CUTE_DEVICE Ordered(BackwardParams const& params, std::int64_t tile, int part, int n_block)
      : next_(params.workspace.next(params.memory)[tile * params.workspace.parts + part]), n_block_(n_block) {}

  /// Whether it is this block's turn.
  CUTE_DEVICE bool ready() const { return next_.load(cuda::memory_order_acquire) == n_block_; }
  CUTE_DEVICE void await() const {
    while (!ready()) {
    }
  }
  /// By one thread, when all that was added is in memory.
  CUTE_DEVICE void pass() const { next_.store(n_block_ - 1, cuda::memory_order_release); }

 private:
  cuda::atomic_ref<int, cuda::thread_scope_device> next_;
  int n_block_;
};

}  // namespace flashtile
