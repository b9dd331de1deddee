// This scheduler takes the blocks of rows of ragged sequences, longest first.
#pragma once

#include <cstdint>

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/mask/mask.h"
#include "flashtile/scheduler/sections.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// A part is a run of neighbouring blocks of rows of one sequence. It has a place for each, a slot of the scheduler's
/// list that stands for a block in all heads. Its tiles are ordered section by section (see BlockOfSection), so that
/// the block with the most work of each head comes first and the one with the least last.
struct RaggedPart {
  int first_place;
  int batch;
  int first_block;
  int blocks;
  int heads_at_once;

  /// Sets `head` and `block` to those of the tile `index`, one of this part's. `last_first` says whether the last block
  /// of a sequence has the most work.
  FLASHTILE_HOST_DEVICE void find(unsigned index, int heads, bool last_first, int& head, int& block) const {
    const unsigned within = index - unsigned(first_place) * unsigned(heads);
    const BlockOfSection found = BlockOfSection::at(within, heads, blocks, heads_at_once);
    head = found.head;
    block = first_block + (last_first ? blocks - 1 - found.rank : found.rank);
  }
};

/// RaggedEntry is a part as thread blocks find it in the list.
struct alignas(16) RaggedEntry : RaggedPart {
  int blocks_of_sequence;
  Sequence sequence;
};
static_assert(sizeof(RaggedEntry) == 48);

/// RaggedTile is the block of rows that a thread block takes.
struct RaggedTile {
  const RaggedEntry* entry = nullptr;
  int head = 0;
  int block = 0;
};

/// RaggedTiles is scheduler metadata: all sequences' blocks of rows, longest first. The host does not know the lengths,
/// so a kernel that runs before makes the list (list_tiles). Under a mask a sequence is listed in parts, the first of
/// which is two thirds of its blocks, the next a half of the rest, and so on. So the last tiles are little work, of
/// whatever sequence, and the tail effect is small.
struct RaggedTiles {
  RaggedEntry* list = nullptr;  // the part of each place; null if there is no list
  int* listed = nullptr;        // number of places listed
  int* taken = nullptr;         // tiles asked for so far: all, or those after the first of each thread block

  /// Returns the bytes that `places` places take, from a 16-byte aligned address on.
  static std::int64_t bytes(std::int64_t places) { return places * std::int64_t(sizeof(RaggedEntry)) + 16; }
  static RaggedTiles at(void* memory, std::int64_t places) {
    auto* const list = static_cast<RaggedEntry*>(memory);
    int* const counts = reinterpret_cast<int*>(list + places);
    return {list, counts, counts + 1};
  }

  FLASHTILE_HOST_DEVICE bool given() const { return list != nullptr; }

  /// Returns whether there is a tile `index`, and sets `tile` to it. `last_first` says whether the last block of a
  /// sequence has the most work.
  FLASHTILE_HOST_DEVICE bool find(unsigned index, int heads, bool last_first, RaggedTile& tile) const {
    const unsigned place = index / unsigned(heads);
    if (place >= unsigned(*listed)) return false;
    tile.entry = &list[place];
    tile.entry->find(index, heads, last_first, tile.head, tile.block);
    return true;
  }
};

/// RaggedOrder says in which order tiles are taken.
struct RaggedOrder {
  static constexpr int kClasses = 256;  // classes of lengths, eight to an octave
  static constexpr int kMostParts = 4;
  static constexpr int kFewSequences = 32;          // up to so many sequences need no list, but FewSequences,
  static constexpr int kFewPlaces = (1 << 16) - 1;  // which has up to so many places
  enum class Of : std::uint8_t { kQueries, kKeys };
  RaggedTiles tiles;
  Of of = Of::kQueries;
  Divisor rows;               // rows of a block
  Mask mask;                  // that of the queries, whatever is listed
  Divisor heads;              // heads, each with a tile in every place
  int parts = 1;              // parts of a sequence, at most
  int blocks_of_section = 0;  // blocks that the heads of a section have together, about; 0: a section is one head
};

}  // namespace flashtile
