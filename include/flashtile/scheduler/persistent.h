// This scheduler is for persistent thread blocks: as many as multiprocessors, each of which takes tile after tile.
#pragma once

#include <cstdint>

#include "flashtile/macros.h"
#include "flashtile/scheduler/sections.h"
#include "flashtile/scheduler/single.h"

namespace flashtile {

/// PersistentScheduler says which tile a thread block takes after which. The host fixes that beforehand
/// (cpp/select/balance.cpp), so there is no counter that someone would have to reset.
///
/// Tiles are ordered section by section (see BlockOfSection): first comes the last block of query rows of each head,
/// then the last but one, and so on; under a causal mask that is longest first. Every other section runs the other way,
/// so that work is about equal where two of them meet, and the last one ends with the least.
///
/// In each of the first `rounds` rounds every thread block takes one tile. Rounds alternate in direction: the one that
/// got the longest tile of a round gets the shortest of the next. The tiles that are left, of two or three rounds, are
/// dealt one by one.
struct PersistentScheduler {
  static constexpr int kMaxBlocks = 144;  // as many multiprocessors as Hopper's largest die has
  static constexpr int kMaxDealt = 3 * kMaxBlocks;

  int heads = 1;  // query heads, or packs of them
  int m_blocks = 1;
  int batch_heads = 1;  // batch · heads
  int heads_at_once = 1;
  int blocks = 1;
  int rounds = 0;
  std::uint16_t dealt_from[kMaxBlocks + 1] = {};  // block b: entries [dealt_from[b], dealt_from[b + 1]) of `dealt`
  std::uint16_t dealt[kMaxDealt] = {};            // indices of tiles, counted from the first that no round has

  // Indices are unsigned, as they may be as large as int allows.
  FLASHTILE_HOST_DEVICE unsigned tiles() const { return unsigned(batch_heads) * unsigned(m_blocks); }
  FLASHTILE_HOST_DEVICE unsigned tiles_of_rounds() const { return unsigned(rounds) * unsigned(blocks); }

  /// Returns how many tiles a thread block takes.
  FLASHTILE_HOST_DEVICE int tiles_of(int block) const { return rounds + dealt_from[block + 1] - dealt_from[block]; }

  /// Returns the index of the n-th tile that a thread block takes.
  FLASHTILE_HOST_DEVICE unsigned index(int n, int block) const {
    if (n >= rounds) return tiles_of_rounds() + dealt[dealt_from[block] + n - rounds];
    return unsigned(n) * unsigned(blocks) + unsigned(n % 2 == 0 ? block : blocks - 1 - block);
  }

  FLASHTILE_HOST_DEVICE TileCoord tile(unsigned index) const {
    const BlockOfSection found = BlockOfSection::at(index, batch_heads, m_blocks, heads_at_once);
    const int batch = found.head / heads;
    const int sections_after = (batch_heads - 1) / heads_at_once - found.section;
    return {batch, found.head - batch * heads, sections_after % 2 == 0 ? m_blocks - 1 - found.rank : found.rank};
  }

  /// Returns the tile of an index where sections come in parts.
  FLASHTILE_HOST_DEVICE TileCoord tile_in_parts(unsigned index) const {
    const BlockOfSection found = BlockOfSection::in_parts(index, batch_heads, m_blocks, heads_at_once);
    const int batch = found.head / heads;
    return {batch, found.head - batch * heads, m_blocks - 1 - found.rank};
  }
};

}  // namespace flashtile
