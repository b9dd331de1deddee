// The keys that a tile of query rows sees, in blocks.
#pragma once

#include "flashtile/math/mask.h"

namespace flashtile {

/// Blocks of kN keys, from the first visible key on.
///
/// Masks are aligned at the last key, so dropping keys at the front leaves the same problem with a shorter seqlen_k:
/// `lengths` and all block indices are those of that problem.
template <int kN>
struct VisibleKeys {
  int first;  // of all keys
  int count;  // up to the last visible one
  int blocks;
  Range interior;   // blocks that need no mask
  Lengths lengths;  // all rows, and the keys from `first` on

  VisibleKeys() = default;
  FLASHTILE_HOST_DEVICE VisibleKeys(Band band, Range rows, Lengths all)
      : VisibleKeys(band, rows, all, band.columns(rows.begin, all).begin) {}
  /// From `first` on, the first visible key or one before it.
  FLASHTILE_HOST_DEVICE VisibleKeys(Band band, Range rows, Lengths all, int first) : first(first) {
    lengths = {all.q, all.k - first};
    if (rows.empty()) {
      count = blocks = 0;
      return;
    }
    count = band.columns(rows.end - 1, lengths).end;
    const TileRanges tiles = band.tiles(rows, kN, lengths);
    blocks = tiles.visible.end;
    interior = tiles.interior;
  }
};

}  // namespace flashtile
