// This file divides the keys that a tile of query rows sees into blocks.
#pragma once

#include "flashtile/mask/band.h"

namespace flashtile {

/// VisibleKeys are blocks of kN keys, which begin at the first visible key.
///
/// Masks are aligned at the last key, so without the keys before that one the problem is the same with a shorter
/// seqlen_k: `lengths` and all block indices are those of the shorter problem.
template <int kN>
struct VisibleKeys {
  int first;  // first key of block 0, counted among all keys
  int count;  // keys from there up to the last visible one
  int blocks;
  Range interior;   // blocks that need no mask
  Lengths lengths;  // all rows, and the keys from `first` on

  VisibleKeys() = default;
  FLASHTILE_HOST_DEVICE VisibleKeys(Band band, Range rows, Lengths all)
      : VisibleKeys(band, rows, all, band.columns(rows.begin, all).begin) {}
  /// Begins the blocks at `first`, the first visible key or one before it.
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
