// This file maps and masks scores over a cache, where a tile's rows are all query heads of a KV head and each group of
// warps has keys of its own.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/kvcache_params.h"
#include "flashtile/mainloop/scores.h"

namespace flashtile {

/// KvcacheScores are the scores of the keys that one group of warps has: blocks of kN, every kGroups-th. It does what
/// ScoreTile does, for the heads of a GroupPacking. A thread has kOfEight columns of every eight.
template <int kN, int kGroups, int kOfEight, bool kPlain>
struct KvcacheScores {
  ScoreTile<GroupPacking> tile;
  LastColumns const& masked;
  int group;
  /// Returns which column among the keys of all groups `first_column` is, where a block of this group's keys begins.
  CUTE_DEVICE int column(int first_column) const { return first_column * kGroups + group * kN; }

  template <Softcaps kSoftcaps, class Scores, class Coord>
  CUTE_DEVICE void map(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    ScoreParams<GroupPacking> const& params = tile.params;
    if (params.map.capped) tile.template cap<kSoftcaps>(scores);
    if (!params.map.stretched) return;
    const int first_head = tile.tile.head * params.packing.heads.value, first_row = found_here();
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const int row = first_row + get<0>(coord(r, 0));
      const float slope = params.slopes.at(tile.tile.batch, first_head + params.packing.head(row));
      const int to_diagonal = column(first_column) - tile.lengths.diagonal(params.packing.query(row));
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c)
        scores(r, c) = params.map.outer * scores(r, c) - slope * fabsf(float(to_diagonal + get<1>(coord(r, c))));
    }
  }

  template <class Scores, class Coord>
  CUTE_DEVICE void mask(Scores& scores, Coord const& coord, int first_column) const {
    if (kPlain && tile.params.mask.band.left == Band::kUnbounded)
      hide_from_last(scores, coord, column(first_column));
    else
      tile.template mask<8, kOfEight>(scores, coord, column(first_column));
    if (masked.count > 0) [[unlikely]]
      hide(scores, coord, column(first_column));
  }

  /// Hides what the column mask hides of a block, which need not have a key of the mask. Each lane asks one column, for
  /// all rows of its warp, and tells the others: to ask for each score would be more code, which has to be fetched just
  /// for the few blocks that need it.
  template <class Scores, class Coord>
  CUTE_DEVICE void hide(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    const int keys = tile.lengths.k, first = masked.first(keys);
    if (first_column + kN <= first) return;
    GroupPacking const& packing = tile.params.packing;
    const int heads = packing.heads.value, first_head = tile.tile.head * heads;
    const int mask = masked.ranges.mask_of(first_head);
    if (kN > 32 || mask != masked.ranges.mask_of(first_head + heads - 1)) [[unlikely]]
      return hide_of_each_head(scores, coord, first_column);

    const int row_of_warp = __shfl_sync(0xffffffff, get<0>(coord(0, 0)), 0), first_row = found_here() + row_of_warp;
    const int first_query = packing.query(first_row), heads_before = first_row - first_query * heads;
    const auto from = [&](int query) {  // bits of the warp's rows from those of a query on; a shift by 32 leaves none
      const int queries = min(max(query, first_query) - first_query, 32);
      return __funnelshift_lc(0u, ~0u, max(queries * heads - heads_before, 0));
    };
    const auto bits_of = [&](Range queries) { return from(queries.begin) & ~from(queries.end); };
    const int index = first_column + int(threadIdx.x % 32) - first, last = keys - 1 - first;
    const HiddenRows rows = masked.of_mask(tile.tile.batch, mask, keys)[max(min(index, last), 0)];
    const std::uint32_t of_lane = index < 0 || index > last ? 0 : bits_of(rows.first) | bits_of(rows.second);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      const int column = get<1>(coord(0, 0)) + c / kOfEight * 8 + c % kOfEight;
      const std::uint32_t of_column = __shfl_sync(0xffffffff, of_lane, column % 32);
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r)
        if (of_column >> (get<0>(coord(r, 0)) - row_of_warp) & 1) scores(r, c) = -kInfinity;
    }
  }

  /// Does the same where heads of the group have masks of their own.
  template <class Scores, class Coord>
  CUTE_DEVICE void hide_of_each_head(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    constexpr int kRows = size<0>(decltype(scores.layout()){});
    const int keys = tile.lengths.k, first = masked.first(keys), first_row = found_here();
    GroupPacking const& packing = tile.params.packing;
    int query[kRows];
    const HiddenRows* columns[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row + get<0>(coord(r, 0));
      const int head = tile.tile.head * packing.heads.value + packing.head(row);
      query[r] = packing.query(row);
      columns[r] = masked.of_mask(tile.tile.batch, masked.ranges.mask_of(head), keys);
    }
    for_columns_in_turn<kOfEight>(scores, [&](int c) {
      CUTE_UNROLL
      for (int i = 0; i < kOfEight; ++i) {
        const int key = first_column + get<1>(coord(0, 0)) + c / kOfEight * 8 + i;
        if (key < first || key >= keys) continue;
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const HiddenRows hidden = columns[r][key - first];
          if (hidden.hides(query[r])) scores(r, i) = -kInfinity;
        }
      }
    });
  }

 private:
  /// Does the same where each row sees all keys up to its last one.
  template <class Scores, class Coord>
  CUTE_DEVICE void hide_from_last(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const int query = tile.params.packing.query(tile.first_row, get<0>(coord(r, 0)));
      const int seen = tile.params.mask.columns(query, tile.lengths).end - first_column - get<1>(coord(r, 0));
      const int end = columns_before<8, kOfEight>(seen);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c)
        if (c >= end) scores(r, c) = -kInfinity;
    }
  }

  /// Returns the tile's first row. The asm hides it from the compiler, as in the mainloop: what follows from it is
  /// computed where it is asked for, not ahead of the loop over blocks, as few calls need it.
  CUTE_DEVICE int found_here() const {
    int first_row = tile.first_row;
    asm volatile("" : "+r"(first_row));
    return first_row;
  }
};

}  // namespace flashtile
