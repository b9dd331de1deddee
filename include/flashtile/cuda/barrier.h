// This file has the kinds of barriers of Hopper's kernels: who arrives, who waits, and for what. A kernel's own
// barriers are in its SharedStorage or in HandOut. Named barriers are here (Turns), where forward_sm90 begins, in
// change_passes, and, on Ampere, in BackwardMainloopSm80.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

namespace flashtile {

/// Keeps the compiler from moving reads and writes of memory across it: to the compiler, CUTLASS's barriers order
/// nothing but themselves.
CUTE_DEVICE void keep_order() {
  asm volatile("" ::: "memory");
}

/// Waits until a phase of this parity is complete, but not longer than about so many nanoseconds, and returns whether
/// it is.
CUTE_DEVICE bool wait_at_most(cutlass::arch::ClusterBarrier& barrier, unsigned parity, unsigned nanoseconds) {
  unsigned complete;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; selp.b32 %0, 1, 0, p; }"
               : "=r"(complete)
               : "r"(cute::cast_smem_ptr_to_uint(&barrier)), "r"(parity), "r"(nanoseconds)
               : "memory");
  return complete != 0;
}

/// A cursor is a stage of a ring buffer of kStages stages, with the parity (phase bit) of its barriers in this round.
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

/// A ring buffer has stages of shared memory that a producer fills, by TMA or by its own writes, and consumers empty,
/// in the same order.
///
///   full[s]   consumers wait for the stage to be filled: the producer thread arrives with the bytes that it expects,
///             perhaps none, and the TMA engine counts the bytes that land; or several warps fill it, and each arrives
///   empty[s]  the producer waits for the stage to be free: consumers arrive when they have read it
template <int kStages>
struct Ring {
  using Cursor = RingCursor<kStages>;
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  /// One thread calls it before any other touches the ring. A stage is empty after `arrivals` arrivals of consumers,
  /// and full after those of `producers`.
  CUTE_DEVICE void init(int arrivals, int producers = 1) {
    CUTE_UNROLL
    for (int s = 0; s < kStages; ++s) {
      full[s].init(producers);
      empty[s].init(arrivals);
    }
  }

  /// The producer waits until consumers have emptied the stage, has `prepare()` write to it, and then announces the
  /// bytes that prepare() returns. Returns the barrier that the landing of these bytes completes.
  template <class Prepare>
  CUTE_DEVICE std::uint64_t* fill(Cursor at, Prepare&& prepare) {
    empty[at.stage].wait(at.parity ^ 1);  // the phase before the first counts as done: nobody waits in the first round
    keep_order();
    const auto bytes = prepare();
    keep_order();
    full[at.stage].arrive_and_expect_tx(bytes);
    return reinterpret_cast<std::uint64_t*>(&full[at.stage]);
  }

  /// A whole warp does the same, so that its cursors stay warp-uniform: all lanes wait for the stage to be empty, then
  /// one of them announces `bytes` and calls `load(barrier)`.
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

  /// Consumers call one of these when they have done reading what TMA will write again, for which the producer waits: a
  /// warp arrives once, for all its lanes, or each thread for itself.
  CUTE_DEVICE void release_by_warp(Cursor at) {
    __syncwarp();  // keeps the order of memory accesses, too, as keep_order() does
    if (threadIdx.x % 32 == 0) empty[at.stage].arrive();
  }
  CUTE_DEVICE void release_by_thread(Cursor at) {
    keep_order();
    empty[at.stage].arrive();
  }
};

/// Lets warpgroups take turns at the tensor cores. Each has one of the named barriers 0, 1, 2 of those that CUTLASS
/// leaves to its users, of 256 threads: its own 128 wait for their turn, and the 128 of the warpgroup before arrive
/// when theirs is over.
template <int kWarpgroups>
struct Turns {
  int warpgroup;

  /// All warpgroups call it once: the last one arrives for warpgroup 0, which has the first turn.
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
