// This file says which keys of which tiles a thread block over a cache attends to.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/warp.h"
#include "flashtile/kvcache_params.h"

namespace flashtile {

/// A segment is some of the keys of one tile.
struct KvcacheSegment {
  int batch;
  int m_block;
  Span queries;
  int first_row;  // row of the cache that is key 0
  SplitKeys::Tile tile;
  int first_item;  // index of the tile's first item among all
  Range items;     // items of this segment, among the tile's
};

/// KvcacheShare is the share of one team of thread blocks (see SplitKeys). Each warp finds it by itself, with a lane
/// for each of 32 sequences, as this delays the load of the first key of each tile.
template <int kM, int kItem>
struct KvcacheShare {
  SplitKeys const& schedule;
  int team;
  int item = 0, items_end = -1;  // next item and end of the share, once it is known

  /// Calls `visit(segment, shares)` for each segment, where `shares` are those of all teams.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) {
    const int lane = threadIdx.x % 32;
    // This is how many rows of the cache the lane's sequence holds. It is loaded early, while the code that needs it is
    // fetched into the instruction cache.
    int held = 0;
    if (lane < schedule.rows.batch)
      asm volatile("ld.global.b32 %0, [%1];" : "=r"(held) : "l"(schedule.rows.held + lane));
    if (!sorted()) return;

    // First the items of all sequences are counted, then those sequences are looked at again that the share may lie in;
    // up to 32 sequences are looked at once.
    const int entries = schedule.queries.entries();
    TeamShares shares{};
    int all = 0, line_end = 0;  // items of all sequences; and of those up to, and with, these 32
    CUTE_NO_UNROLL
    for (int first = 0; first < entries && item != items_end; first += 32) {
      Sequence own;
      int items = 0;  // items of all the sequence's tiles
      if (first + lane < entries) {
        if (first > 0) held = schedule.rows.held_of(first + lane);
        items = look_at(first + lane, held, own);
      }
      if (items_end < 0) {
        all += items;
        if (first + 32 < entries) continue;
        shares = TeamShares::of(__reduce_add_sync(0xffffffff, all), schedule.teams);
        item = shares.first_item(team);
        items_end = shares.first_item(team + 1);
        if (first > 0) {
          held = schedule.rows.held_of(lane);
          first = -32;
          continue;
        }
      }
      const int end = line_end + sum_up_to_lane(items);
      line_end = __shfl_sync(0xffffffff, end, 31);
      CUTE_NO_UNROLL
      while (item < min(items_end, line_end)) {
        const int found = __ffs(__ballot_sync(0xffffffff, end > item)) - 1;
        visit_tiles(of_lane(own, found), first + found, __shfl_sync(0xffffffff, end - items, found),
                    [&](KvcacheSegment const& segment) { visit(segment, shares); });
      }
    }
  }

 private:
  struct Sequence {
    Span queries;
    int first_row = 0;  // row of the cache
    int tiles = 0;
    SplitKeys::Tile tile;  // the first tile
  };

  /// Returns whether the begins of ragged queries ascend, for all sequences.
  CUTE_DEVICE bool sorted() const {
    if (!schedule.queries.ragged()) return true;
    bool sorted = true;
    CUTE_NO_UNROLL
    for (int b = threadIdx.x % 32; b < schedule.queries.batch; b += 32) sorted &= schedule.sorted(b);
    return __all_sync(0xffffffff, sorted);
  }

  /// Finds sequence `b`, of which the cache holds `held` rows, and returns how many items all its tiles have.
  CUTE_DEVICE int look_at(int b, int held, Sequence& sequence) const {
    const CachedRows::Rows rows = schedule.rows.at(b, held);
    sequence.queries = schedule.queries.at(b);
    sequence.first_row = rows.begin;
    sequence.tiles = schedule.template tiles_of<kM>(sequence.queries);
    int items = 0;
    CUTE_NO_UNROLL
    for (int m = 0; m < sequence.tiles; ++m) {
      const SplitKeys::Tile tile = schedule.template tile<kM, kItem>(sequence.queries, rows, m);
      if (m == 0) sequence.tile = tile;
      items += tile.items;
    }
    return items;
  }

  /// Returns the sum of `x` over this lane and those before it.
  CUTE_DEVICE static int sum_up_to_lane(int x) {
    CUTE_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffff, x, distance);
      if (int(threadIdx.x % 32) >= distance) x += other;
    }
    return x;
  }

  /// Visits the segments of the share in the tiles of one sequence, whose first item is `first_item`.
  template <class Visit>
  CUTE_DEVICE void visit_tiles(Sequence const& sequence, int batch, int first_item, Visit&& visit) {
    KvcacheSegment s;
    s.batch = batch;
    s.first_item = first_item;
    s.queries = sequence.queries;
    s.first_row = sequence.first_row;
    s.tile = sequence.tile;
    CUTE_NO_UNROLL
    for (s.m_block = 0; s.m_block < sequence.tiles && item < items_end; s.first_item += s.tile.items, ++s.m_block) {
      const int length = s.tile.lengths.k;
      if (s.m_block > 0)
        s.tile = schedule.template tile<kM, kItem>(s.queries, {.begin = 0, .held = 0, .end = length}, s.m_block);
      CUTE_NO_UNROLL
      while (item < min(items_end, s.first_item + s.tile.items)) {
        const int begin = item - s.first_item;
        s.items = {begin, schedule.splits() ? begin + 1 : min(s.tile.items, items_end - s.first_item)};
        visit(s);
        item = s.first_item + s.items.end;
      }
    }
  }
};

}  // namespace flashtile
