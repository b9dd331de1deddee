// This file says which score elements full, causal and window masks show.
//
// Row i and column j meet on the diagonal j = i + seqlen_k - seqlen_q (bottom-right alignment). These masks
// are one band around that diagonal.
#pragma once

#include "flashtile/macros.h"
#include "flashtile/range.h"
#include "flashtile/sequence.h"

namespace flashtile {

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

  bool operator==(const Band&) const = default;
};

}  // namespace flashtile
