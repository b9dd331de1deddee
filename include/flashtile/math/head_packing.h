// This file maps a row of a tile to its query and its head.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/range.h"

namespace flashtile {

/// A tile's rows are a pack, some query heads of one group, for one query, then the same heads for the next query
/// (PackGQA of FlashAttention-3). With fewer queries to a tile, fewer keys are visible to only some of its rows, and
/// tiles are full where queries are few. With one head a row is a query.
///
/// The 16 rows of a warp hold whole queries: with 7 heads two of them, and the last two rows are idle. So TMA can load
/// and store the rows of a warp as one box, whatever the number of heads. A tile's first row is the first of a warp.
///
/// A group whose heads are no multiple of a pack's, such as 37, has one more pack, which ends with the group and shares
/// heads with the pack before it. What both compute and store of these is the same.
struct HeadPacking {
  static constexpr int kRows = 16;  // of a warp, and the most heads

  int heads = 1;
  int queries_of_warp = kRows;
  int reciprocal = kSteps;  // of heads, in steps that are fine enough for the rows of a warp
  int group = 1;            // heads of so many that follow each other are in packs of their own,
  Divisor packs;            // as many as this

  static HeadPacking of(int heads, int group) {
    if (group % heads == 0) group = heads;
    return {heads, kRows / heads, (kSteps + heads - 1) / heads, group, Divisor((group + heads - 1) / heads)};
  }

  /// Returns the query of row `row` of the tile that begins with `first_row`. That of an idle row means nothing.
  FLASHTILE_HOST_DEVICE int query(int first_row, int row) const {
    return queries_of(first_row) + queries_of(row) + query_within(row);
  }
  FLASHTILE_HOST_DEVICE int head(int row) const { return row_within(row) - query_within(row) * heads; }
  FLASHTILE_HOST_DEVICE bool idle(int row) const { return query_within(row) >= queries_of_warp; }
  FLASHTILE_HOST_DEVICE bool has_idle_rows() const { return idle(kRows - 1); }
  FLASHTILE_HOST_DEVICE int first_head(int pack) const {
    const int of_group = packs.quotient(pack), before = (pack - of_group * packs.value) * heads;
    return of_group * group + (before + heads < group ? before : group - heads);
  }
  /// Returns how many packs so many query heads make.
  int packs_of(int heads_q) const { return heads_q / group * packs.value; }
  /// Returns how many queries the rows of whole warps have, or how many stand before those of a warp.
  FLASHTILE_HOST_DEVICE int queries_of(int rows) const { return (rows >> kLog2Rows) * queries_of_warp; }
  /// Returns the queries of the `rows` rows from `first_row` on, of whole warps, those below seqlen_q.
  FLASHTILE_HOST_DEVICE Range queries(int first_row, int rows, int seqlen_q) const {
    const int end = queries_of(first_row + rows);
    return {queries_of(first_row), end < seqlen_q ? end : seqlen_q};
  }
  /// Returns how many of `rows` rows one TMA box can have, and how many of those are not idle.
  FLASHTILE_HOST_DEVICE int rows_of_box(int rows) const { return has_idle_rows() ? kRows : rows; }
  FLASHTILE_HOST_DEVICE int used_rows(int rows) const { return queries_of(rows) * heads; }
  bool operator==(const HeadPacking&) const = default;

 private:
  // Shifts stand for divisions, which take more instructions where a number might be negative.
  static constexpr int kLog2Rows = 4, kLog2Steps = 8, kSteps = 1 << kLog2Steps;
  static_assert(kRows == 1 << kLog2Rows);
  FLASHTILE_HOST_DEVICE static int row_within(int row) { return row & (kRows - 1); }
  FLASHTILE_HOST_DEVICE int query_within(int row) const { return row_within(row) * reciprocal >> kLog2Steps; }
};

/// QueriesOfRows are those of two rows of a thread, eight apart, of the 16 of one warp.
struct QueriesOfRows {
  HeadPacking const& packing;
  int row;         // the first one, among those of the warp
  int first, end;  // queries of all the warp's rows; an idle row has the end, or one after it

  /// `place` is the first one's in the tile that begins with `first_row`.
  FLASHTILE_HOST_DEVICE QueriesOfRows(HeadPacking const& of, int first_row, int place)
      : packing(of),
        row(place % HeadPacking::kRows),
        first(of.queries_of(first_row + place)),
        end(first + of.queries_of(HeadPacking::kRows)) {}
  FLASHTILE_HOST_DEVICE int query(int r) const { return first + packing.query(0, row + 8 * (r % 2)); }
  FLASHTILE_HOST_DEVICE int head(int r) const { return packing.head(row + 8 * (r % 2)); }
};

/// Heads are not packed: a row is a query. `none` is 0, which ptxas does not know: where it does, it keeps row numbers
/// in registers from the mask on, and Ampere's backward of D256 spills.
struct NoPacking {
  int none = 0;

  FLASHTILE_HOST_DEVICE int query(int first_row, int row) const { return (first_row + row) >> none; }
};

/// Row r of a sequence is head r % heads of query r / heads, for any number of heads. So keys are read once for all
/// heads of a group (PackGQA of FlashAttention-3).
struct GroupPacking {
  Divisor heads;

  FLASHTILE_HOST_DEVICE int query(int row) const { return heads.quotient(row); }
  FLASHTILE_HOST_DEVICE int query(int first_row, int row) const { return query(first_row + row); }
  FLASHTILE_HOST_DEVICE int head(int row) const { return heads.remainder(row); }
};

}  // namespace flashtile
