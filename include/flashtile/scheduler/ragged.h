// Blocks of rows of ragged sequences, in the order of their work.
#pragma once

#include <cstdint>

#include "flashtile/macros.h"
#include "flashtile/math/mask.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// Neighbouring blocks of rows of one sequence, as thread blocks find them.
struct alignas(16) RaggedEntry {
  int first_place;
  int batch;
  int first_block;
  int blocks;
  int blocks_of_sequence;
  int heads_at_once;  // see RaggedTiles
  Sequence sequence;
};
static_assert(sizeof(RaggedEntry) == 48);

/// Which block of rows a thread block takes.
struct RaggedTile {
  const RaggedEntry* entry = nullptr;
  int head = 0;
  int block = 0;
};

/// The blocks of rows of all sequences, where the host does not know how long they are: a kernel that runs before
/// lists them (list_tiles), those with the most work first. Under a mask a sequence is listed in parts, of which the
/// first is two thirds of its blocks, the next a half of the rest, and so on: so the last to come is little work, of
/// whatever sequence, and thread blocks end together.
///
/// A place of the list stands for one block of rows in all heads. The blocks and heads of one part stand section by
/// section: `heads_at_once` heads side by side, few enough for what they share to stay in the L2 cache, first the block
/// with the most work of each, at last the one with the least.
struct RaggedTiles {
  RaggedEntry* list = nullptr;  // of each place, its part; null: the batch is dense
  int* listed = nullptr;        // places that there are
  int* taken = nullptr;         // tiles asked for so far: all, or those after the first of each thread block

  /// Bytes for `places`, from a 16-byte aligned address on.
  static std::int64_t bytes(std::int64_t places) { return places * std::int64_t(sizeof(RaggedEntry)) + 16; }
  static RaggedTiles at(void* memory, std::int64_t places) {
    auto* const list = static_cast<RaggedEntry*>(memory);
    int* const counts = reinterpret_cast<int*>(list + places);
    return {list, counts, counts + 1};
  }

  FLASHTILE_HOST_DEVICE bool given() const { return list != nullptr; }

  /// Whether there is a tile `index`, and which. `last_first`: whether the last block of a sequence has the most work.
  FLASHTILE_HOST_DEVICE bool find(unsigned index, int heads, bool last_first, RaggedTile& tile) const {
    const unsigned place = index / unsigned(heads);
    if (place >= unsigned(*listed)) return false;
    const RaggedEntry& entry = list[place];
    const int within = int(index - unsigned(entry.first_place) * unsigned(heads));
    const int of_section = entry.heads_at_once * entry.blocks;
    const int section = within / of_section;
    const int within_section = within - section * of_section;
    const int first_head = section * entry.heads_at_once;
    const int here = heads - first_head < entry.heads_at_once ? heads - first_head : entry.heads_at_once;
    const int level = within_section / here;
    tile.entry = &entry;
    tile.head = first_head + within_section - level * here;
    tile.block = entry.first_block + (last_first ? entry.blocks - 1 - level : level);
    return true;
  }
};

/// What list_tiles is asked to list.
struct RaggedOrder {
  static constexpr int kClasses = 256;  // of lengths, eight to an octave
  enum class Of : std::uint8_t { kQueries, kKeys };
  RaggedTiles tiles;
  Of of = Of::kQueries;
  int rows = 1;               // of a block
  Band band;                  // of queries, whatever is listed
  int heads = 1;              // of which there is a tile in each place
  int parts = 1;              // of a sequence, at the most
  int blocks_of_section = 0;  // as many heads stand side by side as have so many blocks
};

}  // namespace flashtile
