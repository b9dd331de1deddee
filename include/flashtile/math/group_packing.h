// The rows of a tile where all query heads of a group stand side by side.
#pragma once

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"

namespace flashtile {

/// Row r of a sequence is head r % heads of query r / heads, however many heads there are: so keys are read once for
/// all of a group (PackGQA of FlashAttention-3).
struct GroupPacking {
  Divisor heads;

  FLASHTILE_HOST_DEVICE int query(int row) const { return heads.quotient(row); }
  FLASHTILE_HOST_DEVICE int head(int row) const { return heads.remainder(row); }
};

}  // namespace flashtile
