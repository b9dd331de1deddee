// This file says which rows of invariant.def may have the parts of a tile shared out among thread blocks.
#pragma once

#include "flashtile/variant.h"

namespace flashtile {

/// Returns whether there is a kernel that shares tiles out: not of the tallest, as few calls have few of them.
constexpr bool may_share_tiles(const Variant& v) {
  return v.tile_m <= 128;
}

}  // namespace flashtile
