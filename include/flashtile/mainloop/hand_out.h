// Work for a thread block that takes one piece after the other: a thread of its own finds the next, in time.
#pragma once

#include "flashtile/cuda/barrier.h"
#include "flashtile/cuda/warp.h"

namespace flashtile {

/// In shared memory: the piece of work that a thread block is at, and the next, from the thread that finds them to the
/// warps that take part. The warp that is ahead of the others asks for the next.
template <class Work>
struct HandOut {
  struct Piece {
    Work work;
    bool there;  // or there is nothing left
  };
  Piece pieces[2];
  Ring<2> ring;
  cutlass::arch::ClusterBarrier asked;

  /// By one thread, before any other touches it. `threads` take part, in whole warps.
  CUTE_DEVICE void init(int threads) {
    ring.init(threads);
    asked.init(1);
  }

  /// By the thread that finds work: hands out what `find(work)` finds, until it returns false; calls `next()` when more
  /// is asked for.
  template <class Find, class Next>
  CUTE_DEVICE void run(Find&& find, Next&& next) {
    Ring<2>::Cursor at{};
    for (unsigned parity = 0;; parity ^= 1) {
      bool there = false;
      ring.fill(at, [&] {
        pieces[at.stage].there = there = find(pieces[at.stage].work);
        return 0;
      });
      if (!there) return;
      at.advance();
      asked.wait(parity);
      next();
    }
  }

  /// By one warp, once for each piece.
  CUTE_DEVICE void ask() {
    if (threadIdx.x % 32 == 0) asked.arrive();
  }

  /// By whole warps: calls `visit(work)` for each piece, all of it uniform.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) {
    CUTE_NO_UNROLL
    for (Ring<2>::Cursor at{};; at.advance()) {
      ring.wait_full(at);
      if (!pieces[at.stage].there) return;
      visit(of_lane(pieces[at.stage].work, 0));
      ring.release_by_thread(at);  // racecheck counts only what a thread itself did before it arrives
    }
  }
};

}  // namespace flashtile
