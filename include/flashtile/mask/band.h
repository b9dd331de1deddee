// This file says which score elements are visible and which tiles hold a visible one: both answers come from here.
//
// Row i and column j meet on the diagonal j = i + seqlen_k - seqlen_q (bottom-right alignment). Full, causal and window
// masks are one band around that diagonal.
#pragma once

#include "flashtile/macros.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// A range of indices is half-open: [begin, end).
struct Range {
  int begin = 0;
  int end = 0;

  FLASHTILE_HOST_DEVICE bool empty() const { return end <= begin; }
  FLASHTILE_HOST_DEVICE bool contains(int i) const { return begin <= i && i < end; }
  bool operator==(const Range&) const = default;
};

/// Of the tiles along one axis, those in `visible` hold a visible element, and those in `interior` (a part of
/// `visible`) hold no hidden one. Only edge tiles, those of `visible` minus `interior`, need a mask test.
struct TileRanges {
  Range visible;
  Range interior;
};

struct Band {
  // This is far beyond any length, yet diagonal ± kUnbounded stays inside int: lengths are below 2^30 (see check).
  static constexpr int kUnbounded = 1 << 30;

  int left = kUnbounded;   // visible keys reach this far behind the diagonal, inclusive
  int right = kUnbounded;  // and this far ahead of it

  static constexpr Band full() { return {}; }
  static constexpr Band causal() { return {kUnbounded, 0}; }

  FLASHTILE_HOST_DEVICE Band intersect(Band other) const {
    return {left < other.left ? left : other.left, right < other.right ? right : other.right};
  }

  /// Returns the band that has the same (row, column) pairs with rows and columns exchanged, for Lengths::transposed().
  FLASHTILE_HOST_DEVICE Band transposed() const { return {right, left}; }

  /// Returns the columns that `row` sees.
  FLASHTILE_HOST_DEVICE Range columns(int row, Lengths n) const {
    const int diagonal = n.diagonal(row);
    const int begin = diagonal - left;
    const int last = diagonal + right;
    return {begin > 0 ? begin : 0, last < n.k ? last + 1 : n.k};
  }

  FLASHTILE_HOST_DEVICE bool keep(int row, int column, Lengths n) const { return columns(row, n).contains(column); }

  /// Returns the tiles of `tile` columns that the rows of `rows`, a non-empty part of [0, n.q), see.
  ///
  /// Both bounds of columns(i) grow with i, and bands of neighbouring rows touch, so the union over rows runs from the
  /// first row's begin to the last row's end, and the intersection from the last row's begin to the first's end.
  FLASHTILE_HOST_DEVICE TileRanges tiles(Range rows, int tile, Lengths n) const {
    const Range first = columns(rows.begin, n);
    const Range last = columns(rows.end - 1, n);
    TileRanges ranges;
    if (last.end <= first.begin) return ranges;
    ranges.visible = {first.begin / tile, (last.end + tile - 1) / tile};
    ranges.interior = {(last.begin + tile - 1) / tile, first.end > 0 ? first.end / tile : 0};
    if (ranges.interior.empty()) ranges.interior = {ranges.visible.begin, ranges.visible.begin};
    return ranges;
  }

  bool operator==(const Band&) const = default;
};

}  // namespace flashtile
