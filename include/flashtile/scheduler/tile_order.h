// This file finds the tile of an index for Hopper's persistent forward kernel, without a division.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/scheduler/persistent.h"

namespace flashtile {

/// TileOrder is the order of a PersistentScheduler, with multiplications for its divisions: all roles of a thread block
/// wait until its first tile is found, and four divisions in a row take half a microsecond.
struct TileOrder {
  Divisor heads;          // of a batch entry
  Divisor tiles;          // of a section
  Divisor heads_here;     // of a section,
  Divisor heads_of_last;  // and of the last one, which may have fewer
  int last_section = 0;
  int m_blocks = 1;

  static TileOrder of(PersistentScheduler const& s) {
    const int all = s.batch_heads, here = all < s.heads_at_once ? all : s.heads_at_once;
    const int last = all == 0 ? 0 : (all - 1) / s.heads_at_once;
    return {.heads = Divisor(s.heads),
            .tiles = Divisor(here * s.m_blocks),
            .heads_here = Divisor(here),
            .heads_of_last = Divisor(all - last * s.heads_at_once),
            .last_section = last,
            .m_blocks = s.m_blocks};
  }

  /// Returns the same as PersistentScheduler::tile().
  FLASHTILE_HOST_DEVICE TileCoord tile(unsigned index) const {
    const int section = tiles.quotient(int(index)), within = int(index) - section * tiles.value;
    const Divisor here = section == last_section ? heads_of_last : heads_here;
    const int rank = here.quotient(within);
    const int head = section * heads_here.value + within - rank * here.value;
    const int batch = heads.quotient(head);
    return {batch, head - batch * heads.value, (last_section - section) % 2 == 0 ? m_blocks - 1 - rank : rank};
  }
};

}  // namespace flashtile
