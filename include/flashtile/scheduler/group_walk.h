// This file cuts the walk of a block of keys over the queries of its group into parts of equal length.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/mask/walk.h"

namespace flashtile {

/// GroupWalk is a part of the walk of a block of keys over the tiles of queries of all heads of its group, or all of
/// it. A step of the walk is one tile of one head. The walk goes through one head after the other, through the tiles of
/// each from `start` on and around; or `by_tiles`, from `start` to the last of them, through all heads of each.
struct GroupWalk {
  BlockWalk queries;                   // of each head
  int start, step;                     // first tile of the walk over a head, and the direction: 1 or −1
  bool by_tiles;                       // then the walk begins with the first tile of its direction
  Range heads;                         // those of the part, if by_tiles
  int first_head, first_tile_of_head;  // the part's first step
  int steps;                           // steps of the part, perhaps none

  FLASHTILE_HOST_DEVICE bool empty() const { return steps == 0; }

  /// Becomes the `part`-th part of the walk over `group` heads from `head` on, once all before `heads` is set. Parts
  /// are as long as each other, but for the last ones, which may be shorter or empty. If so asked, they have whole
  /// heads.
  FLASHTILE_HOST_DEVICE void cut(int head, int group, int part, Divisor parts, bool whole_heads) {
    const int blocks = queries.blocks(), units = whole_heads ? group : group * blocks;
    const int length = units == 0 ? 0 : parts.quotient(units - 1) + 1;
    const int begin = part * length < units ? part * length : units;
    const int end = begin + length < units ? begin + length : units;
    steps = (end - begin) * (whole_heads ? blocks : 1);
    first_head = head;
    first_tile_of_head = start;
    if (by_tiles) {
      heads = {head, head + group};
      if (whole_heads) {
        heads = {head + begin, head + end};
        first_head = heads.begin;
      } else if (begin > 0) {  // most calls have one part, and are spared the division
        first_head += begin % group;
        first_tile_of_head += step * (begin / group);
      }
      return;
    }
    int tiles = whole_heads ? begin * blocks : begin;
    // Heads are few: this spares a division and its registers.
    while (tiles >= blocks && blocks > 0) tiles -= blocks, ++first_head;
    first_tile_of_head += step * tiles;
    if (first_tile_of_head >= queries.end()) first_tile_of_head -= blocks;
    if (first_tile_of_head < queries.first()) first_tile_of_head += blocks;
  }

  /// Goes one step on.
  FLASHTILE_HOST_DEVICE void advance(int& head, int& m_block) const {
    by_tiles ? advance_by_tiles(head, m_block) : advance_by_heads(head, m_block);
  }
  FLASHTILE_HOST_DEVICE void advance_by_tiles(int& head, int& m_block) const {
    if (++head == heads.end) head = heads.begin, m_block += step;
  }
  FLASHTILE_HOST_DEVICE void advance_by_heads(int& head, int& m_block) const {
    m_block = queries.next_around(m_block, step);
    if (m_block == start) ++head;
  }
};

}  // namespace flashtile
