// This file says which blocks of columns a tile of rows visits, in what order, and which of them need a mask test.
#pragma once

#include "flashtile/macros.h"
#include "flashtile/range.h"

namespace flashtile {

/// BlockKind says what a tile of rows sees of a block of columns: nothing, some elements, or all of them. A skipped
/// block is not even loaded, and an interior one needs no mask test.
enum class BlockKind { kSkip, kEdge, kInterior };

/// BlockWalk is the walk of a tile of rows over the blocks of columns that it sees. All blocks have the same width.
struct BlockWalk {
  Range visible;   // blocks that hold a visible element
  Range interior;  // those of them that hold no hidden one

  FLASHTILE_HOST_DEVICE bool empty() const { return visible.empty(); }
  FLASHTILE_HOST_DEVICE int blocks() const { return visible.end - visible.begin; }
  FLASHTILE_HOST_DEVICE int first() const { return visible.begin; }
  FLASHTILE_HOST_DEVICE int last() const { return visible.end - 1; }
  FLASHTILE_HOST_DEVICE int end() const { return visible.end; }
  FLASHTILE_HOST_DEVICE int next(int block) const { return block + 1; }

  /// Returns the block after `block` in the direction `step`, 1 or −1, where the first one follows the last.
  FLASHTILE_HOST_DEVICE int next_around(int block, int step) const {
    block += step;
    if (block == end()) return first();
    return block < first() ? last() : block;
  }

  FLASHTILE_HOST_DEVICE BlockKind kind(int block) const {
    return !visible.contains(block) ? BlockKind::kSkip : is_edge(block) ? BlockKind::kEdge : BlockKind::kInterior;
  }
  /// Returns whether a block of the walk needs a mask test.
  FLASHTILE_HOST_DEVICE bool is_edge(int block) const { return !interior.contains(block); }

  /// Returns the part of one of several sharers, who take the blocks in turn, and each counts its own ones.
  FLASHTILE_HOST_DEVICE BlockWalk share(int sharer, int sharers) const {
    const auto below = [&](int n) { return n > sharer ? (n - sharer + sharers - 1) / sharers : 0; };
    return {{below(visible.begin), below(visible.end)}, {below(interior.begin), below(interior.end)}};
  }

  bool operator==(const BlockWalk&) const = default;
};

}  // namespace flashtile
