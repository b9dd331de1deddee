// The kinds of barriers of Hopper's kernels: who arrives, who waits, and for what. A kernel's own ones stand in its
// SharedStorage, or in HandOut. Named ones are here, in begin_second_pass, and, on Ampere, in BackwardMainloopSm80.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

namespace flashtile {

/// What stands before it is read and written before what stands behind it: to the compiler CUTLASS's barriers order
/// nothing but themselves.
CUTE_DEVICE void keep_order() {
  asm volatile("" ::: "memory");
}

/// A place in a ring of kStages stages, and the parity of the barriers of this round.
template <int kStages>
struct RingCursor {
  int stage = 0;
  unsigned parity = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  CUTE_DEVICE RingCursor previous() const {
    return stage > 0 ? RingCursor{stage - 1, parity} : RingCursor{kStages - 1, parity ^ 1};
  }
};

/// Stages of shared memory that a producer fills, by TMA or by itself, and consumers empty, in the same order.
///
///   full[s]   the producer thread arrives with the bytes it expects, perhaps none, the TMA engine with the bytes;
///             consumers wait
///   empty[s]  consumers arrive; the producer waits
template <int kStages>
struct Ring {
  using Cursor = RingCursor<kStages>;
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  /// By one thread, before any other touches the ring. `arrivals` of consumers empty a stage.
  CUTE_DEVICE void init(int arrivals) {
    CUTE_UNROLL
    for (int s = 0; s < kStages; ++s) {
      full[s].init(1);
      empty[s].init(arrivals);
    }
  }

  /// Producer: waits for the stage to be empty, and announces the bytes that `prepare()` returns, after what it writes.
  /// Returns the barrier that the bytes complete.
  template <class Prepare>
  CUTE_DEVICE std::uint64_t* fill(Cursor at, Prepare&& prepare) {
    empty[at.stage].wait(at.parity ^ 1);  // a new barrier counts as past its first round
    keep_order();
    const auto bytes = prepare();
    keep_order();
    full[at.stage].arrive_and_expect_tx(bytes);
    return reinterpret_cast<std::uint64_t*>(&full[at.stage]);
  }

  /// The same by a whole warp, so that what it counts stays uniform: one of its threads announces `bytes`, and calls
  /// `load(barrier)`.
  template <class Load>
  CUTE_DEVICE void fill_by_warp(Cursor at, int bytes, Load&& load) {
    empty[at.stage].wait(at.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      full[at.stage].arrive_and_expect_tx(bytes);
      load(reinterpret_cast<std::uint64_t*>(&full[at.stage]));
    }
  }

  CUTE_DEVICE void wait_full(Cursor at) {
    full[at.stage].wait(at.parity);
    keep_order();
  }

  /// Consumers, when they have done reading what TMA will write again: a warp arrives once, for all its lanes, or each
  /// thread for itself.
  CUTE_DEVICE void release_by_warp(Cursor at) {
    __syncwarp();  // which keeps the order, too
    if (threadIdx.x % 32 == 0) empty[at.stage].arrive();
  }
  CUTE_DEVICE void release_by_thread(Cursor at) {
    keep_order();
    empty[at.stage].arrive();
  }
};

/// Lets warpgroups take turns, each arriving at the next one's barrier: the named barriers 0, 1, 2 of those that
/// CUTLASS leaves to its users, one per warpgroup, of 256 threads: those who wait and those who let them pass.
template <int kWarpgroups>
struct Turns {
  int warpgroup;

  /// Once, before the first turn of warpgroup 0.
  CUTE_DEVICE void begin() const {
    if (warpgroup == kWarpgroups - 1) pass();
  }
  CUTE_DEVICE void await() const { cutlass::arch::NamedBarrier::sync(256, id(warpgroup)); }
  CUTE_DEVICE void pass() const {
    cutlass::arch::NamedBarrier::arrive(256, id(warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1));
  }

 private:
  CUTE_DEVICE static unsigned id(int warpgroup) { return static_cast<unsigned>(warpgroup); }
};

}  // namespace flashtile
