// Which query and which head a row of a tile is.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/math/mask.h"

namespace flashtile {

/// 2^log2 query heads of one group stand side by side in the rows of a tile, then those of the next query: fewer
/// queries to a tile, so fewer keys that only some of its rows see, and full tiles where queries are few. Known as
/// PackGQA (FlashAttention-3). With log2 = 0 a row is a query.
struct HeadPacking {
  int log2 = 0;

  FLASHTILE_HOST_DEVICE int heads() const { return 1 << log2; }
  FLASHTILE_HOST_DEVICE int query(int row) const { return row >> log2; }
  FLASHTILE_HOST_DEVICE int head(int row) const { return row & (heads() - 1); }
  FLASHTILE_HOST_DEVICE int rows(int queries) const { return queries << log2; }
  FLASHTILE_HOST_DEVICE int first_head(int pack) const { return pack << log2; }
  /// The queries of `rows` rows from `first_row` on.
  FLASHTILE_HOST_DEVICE Range queries(int first_row, int rows, int seqlen_q) const {
    const int end = query(first_row + rows - 1) + 1;
    return {query(first_row), end < seqlen_q ? end : seqlen_q};
  }
  bool operator==(const HeadPacking&) const = default;
};

/// Row r of a sequence is head r % heads of query r / heads, however many heads there are: so keys are read once for
/// all of a group (PackGQA of FlashAttention-3).
struct GroupPacking {
  Divisor heads;

  FLASHTILE_HOST_DEVICE int query(int row) const { return heads.quotient(row); }
  FLASHTILE_HOST_DEVICE int head(int row) const { return heads.remainder(row); }
};

}  // namespace flashtile
