// This file has ranges of indices, as masks, tiles and schedulers have them.
#pragma once

#include "flashtile/macros.h"

namespace flashtile {

/// A range of indices is half-open: [begin, end).
struct Range {
  int begin = 0;
  int end = 0;

  FLASHTILE_HOST_DEVICE bool empty() const { return end <= begin; }
  FLASHTILE_HOST_DEVICE bool contains(int i) const { return begin <= i && i < end; }
  bool operator==(const Range&) const = default;
};

}  // namespace flashtile
