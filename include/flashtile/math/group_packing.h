// This file maps a tile's rows to queries and heads where all query heads of a KV head (a group) share the tile.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"

namespace flashtile {

/// Row r of a sequence is head r % heads of query r / heads, for any number of heads. So keys are read once for all
/// heads of a group (PackGQA of FlashAttention-3).
struct GroupPacking {
  Divisor heads;

  FLASHTILE_HOST_DEVICE int query(int row) const { return heads.quotient(row); }
  FLASHTILE_HOST_DEVICE int head(int row) const { return heads.remainder(row); }
};

}  // namespace flashtile
