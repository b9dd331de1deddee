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
  /// Returns the indices that both ranges have.
  FLASHTILE_HOST_DEVICE Range operator&(Range other) const {
    return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end};
  }
  FLASHTILE_HOST_DEVICE bool meets(Range other) const { return !(*this & other).empty(); }
  bool operator==(const Range&) const = default;
};

}  // namespace flashtile
