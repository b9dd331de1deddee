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
/// for each of 32 sequences, or for up to kOfLane of them if each is one tile, as this delays the load of the first key
/// of each tile. Of more sequences it has to know how many items come before its share: each lane has the number of a
/// section, which is a whole number of times 32 sequences, and the warps of a thread block count these numbers
/// together.
template <int kM, int kItem, int kWarps, Calls kCalls>
struct KvcacheShare {
  SplitKeys const& schedule;
  int (&items_of_section)[32];  // in shared memory
  int team;
  int item = 0, items_end = 0;  // next item and end of the share

  /// Calls `visit(segment, shares)` for each segment, where `shares` are those of all teams.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) {
    const int entries = kOneTileEach ? schedule.queries.batch : schedule.queries.entries();
    const bool alone = entries == 1;  // then all lanes look at the one sequence, and need no other's answer
    const bool in_sections = entries > 32 * kOfLane;
    const int per_lane = in_sections ? 1 : (entries + 31) / 32;  // sequences, which follow each other
    const int lane = alone ? 0 : threadIdx.x % 32, first_of_lane = lane * per_lane;
    // These are how many rows of the cache the lane's sequences hold. They are loaded early, while the code that needs
    // them is fetched into the instruction cache.
    int held[kOfLane] = {};
    const auto load = [&](int i) {
      if (first_of_lane + i < schedule.rows.batch)
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(held[i]) : "l"(schedule.rows.held + first_of_lane + i));
    };
    load(0);
    for_others(per_lane, load);
    if (!kOneTileEach && !sorted()) return;

    TeamShares shares{};
    int first = 0, line_end = 0;  // the next line of 32 · per_lane sequences, and the items of all before these
    if (in_sections) {
      const int of_section = (entries + kOfSections - 1) / kOfSections * 32;  // sequences
      count_sections(entries, of_section);
      const int items = lane * of_section < entries ? items_of_section[lane] : 0, end = sum_up_to_lane(items);
      share_out(__shfl_sync(0xffffffff, end, 31), shares);
      if (item == items_end) return;
      const int found = __ffs(__ballot_sync(0xffffffff, end > item)) - 1;
      first = found * of_section;
      line_end = __shfl_sync(0xffffffff, end - items, found);
    }
    CUTE_NO_UNROLL
    do {
      Sequence own;                                // with kOneTileEach held[] says all
      int items[kOfLane] = {}, items_of_lane = 0;  // items of all the tiles of each sequence
      const auto look = [&](int i) {
        const int b = first + first_of_lane + i;
        if (b < entries) {
          if (in_sections) held[i] = schedule.rows.held_of(b);
          items[i] = look_at(b, held[i], own);
        }
        items_of_lane += items[i];
      };
      look(0);
      for_others(per_lane, look);
      const int end = line_end + (alone ? items_of_lane : sum_up_to_lane(items_of_lane)), begin = end - items_of_lane;
      line_end = __shfl_sync(0xffffffff, end, 31);
      if (!in_sections) share_out(line_end, shares);
      CUTE_NO_UNROLL
      while (item < min(items_end, line_end)) {
        const int found = __ffs(__ballot_sync(0xffffffff, end > item)) - 1;
        // Each lane takes one of its sequences, the lane that was found the one with the next item.
        int which = 0, first_item = begin, held_by_it = held[0];
        for_others(per_lane, [&](int i) {
          if (which == i - 1 && item >= first_item + items[i - 1])
            which = i, first_item += items[i - 1], held_by_it = held[i];
        });
        int b = first + found * per_lane;
        if (per_lane > 1) b += __shfl_sync(0xffffffff, which, found);
        const Sequence sequence = sequence_of(own, held_by_it, found);
        visit_tiles(sequence, b, __shfl_sync(0xffffffff, first_item, found),
                    [&](KvcacheSegment const& segment) { visit(segment, shares); });
      }
      first += 32 * per_lane;
    } while (first < entries && item != items_end);
  }

 private:
  static constexpr bool kPlain = kCalls != Calls::kAll, kOneTileEach = kCalls == Calls::kOneTileEach;
  static constexpr int kOfLane = kOneTileEach ? 4 : 1;
  static constexpr int kOfSections = 32 * 32;  // sequences of all sections, if each has 32

  struct Sequence {
    Span queries;
    int first_row = 0;  // row of the cache
    int tiles = 0;
    SplitKeys::Tile tile;  // the first tile
  };

  /// Calls `visit(i)` for the sequences of a lane after the first. Few calls have such, so one branch leads there.
  template <class Visit>
  CUTE_DEVICE static void for_others(int per_lane, Visit&& visit) {
    if constexpr (kOfLane > 1) {
      if (per_lane == 1) [[likely]]
        return;
      CUTE_UNROLL
      for (int i = 1; i < kOfLane; ++i)
        if (i < per_lane) visit(i);
    }
  }

  /// Returns whether the begins of ragged queries ascend, for all sequences.
  CUTE_DEVICE bool sorted() const {
    if (!schedule.queries.ragged()) return true;
    bool sorted = true;
    CUTE_NO_UNROLL
    for (int b = threadIdx.x % 32; b < schedule.queries.batch; b += 32) sorted &= schedule.sorted(b);
    return __all_sync(0xffffffff, sorted);
  }

  /// Sets the share, of so many items of all teams.
  CUTE_DEVICE void share_out(int items, TeamShares& shares) {
    shares = TeamShares::of(items, schedule.teams);
    item = shares.first_item(team);
    items_end = shares.first_item(team + 1);
  }

  /// Counts the items of each section, of so many sequences. All warps of the thread block call it.
  CUTE_DEVICE void count_sections(int entries, int of_section) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int held = schedule.rows.held_of(warp * of_section + lane);
    CUTE_NO_UNROLL
    for (int section = warp; section * of_section < entries; section += kWarps) {
      const int begin = section * of_section, end = min(begin + of_section, entries);
      int items = 0;
      CUTE_NO_UNROLL
      for (int first = begin; first < end; first += 32) {
        const int next = first + 32 < end ? first + 32 : begin + kWarps * of_section;
        const int held_of_next = schedule.rows.held_of(next + lane);  // loaded while these are counted
        Sequence sequence;
        if (first + lane < end) items += look_at(first + lane, held, sequence);
        held = held_of_next;
      }
      items = __reduce_add_sync(0xffffffff, items);
      if (lane == 0) items_of_section[section] = items;
    }
    __syncthreads();
  }

  /// Finds sequence `b`, of which the cache holds `held` rows, and returns how many items all its tiles have. With
  /// kOneTileEach it does no more than that.
  CUTE_DEVICE int look_at(int b, int held, Sequence& sequence) const {
    if constexpr (kOneTileEach) return schedule.template whole_tile<kItem>(held).items;
    const CachedRows::Rows rows = schedule.rows.at(b, held);
    sequence.queries = schedule.queries.at(b);
    sequence.first_row = rows.begin;
    sequence.tiles = schedule.template tiles_of<kM>(sequence.queries);
    int items = 0;
    CUTE_NO_UNROLL
    for (int m = 0; m < sequence.tiles; ++m) {
      const SplitKeys::Tile tile = tile_of(sequence.queries, rows, m);
      if (m == 0) sequence.tile = tile;
      items += tile.items;
    }
    return items;
  }

  CUTE_DEVICE SplitKeys::Tile tile_of(Span queries, CachedRows::Rows rows, int m_block) const {
    if constexpr (kPlain) return schedule.template plain_tile<kM, kItem>(queries, rows.end, m_block);
    return schedule.template tile<kM, kItem>(queries, rows, m_block);
  }

  /// Returns the sequence of lane `lane`: what it has found of its `own` one, or what it `held`.
  CUTE_DEVICE Sequence sequence_of(Sequence const& own, int held, int lane) const {
    if constexpr (kOneTileEach) {
      const int size = schedule.queries.size;
      return {.queries = {0, size, size},
              .first_row = 0,
              .tiles = 1,
              .tile = schedule.template whole_tile<kItem>(__shfl_sync(0xffffffff, held, lane))};
    }
    return of_lane(own, lane);
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
      if (!kOneTileEach && s.m_block > 0)
        s.tile = tile_of(s.queries, {.begin = 0, .held = 0, .end = length}, s.m_block);
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
