// HandOut brings work to a persistent thread block, piece after piece: one of its threads finds the next in time.
#pragma once

#include "flashtile/cuda/barrier.h"
#include "flashtile/cuda/warp.h"

namespace flashtile {

/// The piece of work that a thread block is at, and the next one, are in shared memory: the thread that finds them
/// hands them to the warps that take part. The warp that is ahead of the others asks for the next.
template <class Work>
struct HandOut {
  struct Piece {
    Work work;
    bool there;  // false if no work is left
  };
  Piece pieces[2];
  Ring<2> ring;                         // the warps wait for a piece, the thread that finds work for a free slot
  cutlass::arch::ClusterBarrier asked;  // that thread waits for the next piece to be asked for

  /// One thread calls it before any other touches it. `threads` take part, in whole warps.
  CUTE_DEVICE void init(int threads) {
    ring.init(threads);
    asked.init(1);
  }

  /// The thread that finds work calls it: it hands out what `find(work)` finds, until that returns false, and calls
  /// `next()` when more is asked for.
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

  /// One warp calls it, once for each piece.
  CUTE_DEVICE void ask() {
    if (threadIdx.x % 32 == 0) asked.arrive();
  }

  /// Whole warps call it. It calls `visit(work, kept)` for each piece, all of which is uniform. `kept` is the same
  /// piece in shared memory: what is needed of it late need not be in registers until then.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) {
    CUTE_NO_UNROLL
    for (Ring<2>::Cursor at{};; at.advance()) {
      ring.wait_full(at);
      if (!pieces[at.stage].there) return;
      visit(of_lane(pieces[at.stage].work, 0), static_cast<Work const&>(pieces[at.stage].work));
      ring.release_by_thread(at);  // racecheck counts only what a thread itself did before it arrives
    }
  }
};

}  // namespace flashtile
