// This file cuts the walk of a block of keys over the queries of its group into parts of equal length.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/mask/walk.h"

namespace flashtile {

/// GroupWalk is a part of the walk of a block of keys over the tiles of queries of all heads of its group, or all of
/// it. A step of the walk is one tile of one head. It goes through one head after the other, through the tiles of each
/// from `start` on and around.
struct GroupWalk {
  BlockWalk queries;                   // of each head
  int start, step;                     // first tile of the walk over a head, and the direction: 1 or −1
  int first_head, first_tile_of_head;  // the part's first step
  int steps;                           // steps of the part, perhaps none

  FLASHTILE_HOST_DEVICE bool empty() const { return steps == 0; }

  /// Becomes part `part` of the walk over `group` heads from `head` on; `queries`, `start` and `step` are set. Parts
  /// are as long as each other, but for the last ones, which may be shorter or empty.
  FLASHTILE_HOST_DEVICE void cut(int head, int group, int part, Divisor parts) {
    first_head = head;
    first_tile_of_head = start;
    steps = group * queries.blocks();
    if (parts.value == 1 || steps == 0) return;
    const int length = parts.quotient(steps - 1) + 1;
    const int before = part * length < steps ? part * length : steps;
    const int heads = before / queries.blocks(), tiles = before - heads * queries.blocks();
    first_head += heads;
    first_tile_of_head += step * tiles;
    if (first_tile_of_head >= queries.end()) first_tile_of_head -= queries.blocks();
    if (first_tile_of_head < queries.first()) first_tile_of_head += queries.blocks();
    steps = length < steps - before ? length : steps - before;
  }

  /// Goes one step on.
  FLASHTILE_HOST_DEVICE void advance(int& head, int& m_block) const {
    m_block = queries.next_around(m_block, step);
    if (m_block == start) ++head;
  }
};

}  // namespace flashtile
