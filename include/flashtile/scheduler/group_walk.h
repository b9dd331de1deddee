// This file cuts the walk of a block of keys over the queries of its group into parts of equal length.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/mask/walk.h"

namespace flashtile {

/// GroupWalk is a part of the walk of a block of keys over the tiles of queries of all heads of its group, or all of
/// it. A step of the walk is one tile of one head. The walk goes through one head after the other, through the tiles of
/// each from `start` on and around; or `by_tiles`, from `start` in one direction, through all heads of each tile.
///
/// Either way it is a loop in a loop, over heads and tiles: advance() is the same code for both, as consumers come
/// through it with each step.
struct GroupWalk {
  BlockWalk queries;                   // of each head
  int start;                           // first tile of the walk over a head
  bool by_tiles;                       // whether the inner loop is that over heads
  int direction;                       // by tiles, from tile to tile: 1 or −1
  Range inner;                         // of the inner loop
  int inner_start;                     // where that begins, to go around
  int outer_step;                      // of the outer loop
  int first_head, first_tile_of_head;  // the part's first step
  int steps;                           // steps of the part, perhaps none

  FLASHTILE_HOST_DEVICE bool empty() const { return steps == 0; }

  /// Becomes the `part`-th part of the walk over `group` heads from `head` on, once what comes before `inner` is set.
  /// Parts are as long as each other, but for the last ones, which may be shorter or empty. By tiles they have whole
  /// heads, if so asked.
  FLASHTILE_HOST_DEVICE void cut(int head, int group, int part, Divisor parts, bool whole_heads) {
    const int blocks = queries.blocks(), units = whole_heads ? group : group * blocks;
    const int length = units == 0 ? 0 : parts.quotient(units - 1) + 1;
    const int begin = part * length < units ? part * length : units;
    const int end = begin + length < units ? begin + length : units;
    steps = (end - begin) * (whole_heads ? blocks : 1);
    first_head = head;
    first_tile_of_head = start;
    if (by_tiles) {
      inner = {head, head + group};
      outer_step = direction;
      if (whole_heads) {
        inner = {head + begin, head + end};
        first_head = inner.begin;
      } else if (begin > 0) {  // most calls have one part, and are spared the division
        first_head += begin % group;
        first_tile_of_head += direction * (begin / group);
      }
      inner_start = inner.begin;
    } else {
      inner = queries.visible;
      inner_start = start;
      outer_step = 1;
      int tiles = begin;
      // Heads are few: this spares a division and its registers.
      while (tiles >= blocks && blocks > 0) tiles -= blocks, ++first_head;
      first_tile_of_head += tiles;
      if (first_tile_of_head >= queries.end()) first_tile_of_head -= blocks;
    }
  }

  /// Goes one step on; `at` is where the inner loop is, and `outer` the outer one.
  FLASHTILE_HOST_DEVICE void advance(int& at, int& outer) const {
    if (++at == inner.end) at = inner.begin;
    if (at == inner_start) outer += outer_step;
  }
  /// Goes one step on from a tile of a head.
  FLASHTILE_HOST_DEVICE void advance_step(int& head, int& tile) const {
    by_tiles ? advance(head, tile) : advance(tile, head);
  }
};

}  // namespace flashtile
