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

  /// Becomes the `part`-th part of the walk over `group` heads from `head` on; `queries`, `start` and `step` are set.
  /// Parts are as long as each other, but for the last ones, which may be shorter or empty. If so asked, they have
  /// whole heads.
  FLASHTILE_HOST_DEVICE void cut(int head, int group, int part, Divisor parts, bool whole_heads) {
    const int blocks = queries.blocks(), all = group * blocks;
    const int last = (whole_heads ? group : all) - 1;
    const int length = all == 0 ? 0 : (parts.quotient(last) + 1) * (whole_heads ? blocks : 1);
    const int before = part * length < all ? part * length : all;
    const int end = before + length < all ? before + length : all;
    steps = end - before;
    int tiles = before;
    first_head = head;
    // Heads are few: this spares a division and its registers.
    while (tiles >= blocks && blocks > 0) tiles -= blocks, ++first_head;
    first_tile_of_head = start + step * tiles;
    if (first_tile_of_head >= queries.end()) first_tile_of_head -= queries.blocks();
    if (first_tile_of_head < queries.first()) first_tile_of_head += queries.blocks();
  }

  /// Goes one step on.
  FLASHTILE_HOST_DEVICE void advance(int& head, int& m_block) const {
    m_block = queries.next_around(m_block, step);
    if (m_block == start) ++head;
  }
};

}  // namespace flashtile
