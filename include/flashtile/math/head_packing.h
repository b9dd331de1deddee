// This file maps a row of a tile to its query and its head.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/range.h"

namespace flashtile {

/// A tile's rows are a pack, 2^log2 query heads of one group, for one query, then the same heads for the next query
/// (PackGQA of FlashAttention-3). With fewer queries to a tile, fewer keys are visible to only some of its rows, and
/// tiles are full where queries are few. With log2 = 0 a row is a query.
struct HeadPacking {
  int log2 = 0;

  FLASHTILE_HOST_DEVICE int heads() const { return 1 << log2; }
  FLASHTILE_HOST_DEVICE int query(int row) const { return row >> log2; }
  FLASHTILE_HOST_DEVICE int head(int row) const { return row & (heads() - 1); }
  FLASHTILE_HOST_DEVICE int rows(int queries) const { return queries << log2; }
  FLASHTILE_HOST_DEVICE int first_head(int pack) const { return pack << log2; }
  /// Returns the queries of the `rows` rows from `first_row` on, those below seqlen_q.
  FLASHTILE_HOST_DEVICE Range queries(int first_row, int rows, int seqlen_q) const {
    const int end = query(first_row + rows - 1) + 1;
    return {query(first_row), end < seqlen_q ? end : seqlen_q};
  }
  bool operator==(const HeadPacking&) const = default;
};

/// Row r of a sequence is head r % heads of query r / heads, for any number of heads. So keys are read once for all
/// heads of a group (PackGQA of FlashAttention-3).
struct GroupPacking {
  Divisor heads;

  FLASHTILE_HOST_DEVICE int query(int row) const { return heads.quotient(row); }
  FLASHTILE_HOST_DEVICE int head(int row) const { return heads.remainder(row); }
};

}  // namespace flashtile
