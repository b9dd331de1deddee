// Blocks of rows of ragged sequences, in the order of their work.
#pragma once

#include <cstdint>

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/math/mask.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// Neighbouring blocks of rows of one sequence. A place stands for one of them in all heads. The blocks and heads of a
/// part stand section by section: `heads_at_once` heads side by side, few enough for what they share to stay in the L2
/// cache, first the block with the most work of each, at last the one with the least.
struct RaggedPart {
  int first_place;
  int batch;
  int first_block;
  int blocks;
  int heads_at_once;

  /// Which tile of its places has `index`. `last_first`: whether the last block of a sequence has the most work.
  FLASHTILE_HOST_DEVICE void find(unsigned index, int heads, bool last_first, int& head, int& block) const {
    const unsigned within = index - unsigned(first_place) * unsigned(heads);
    const unsigned of_section = unsigned(heads_at_once) * unsigned(blocks);
    const unsigned section = within / of_section;
    const int within_section = int(within - section * of_section);
    const int first_head = int(section) * heads_at_once;
    const int here = heads - first_head < heads_at_once ? heads - first_head : heads_at_once;
    const int level = here == 1 ? within_section : int(unsigned(within_section) / unsigned(here));
    head = first_head + within_section - level * here;
    block = first_block + (last_first ? blocks - 1 - level : level);
  }
};

/// A part as thread blocks find it in a list.
struct alignas(16) RaggedEntry : RaggedPart {
  int blocks_of_sequence;
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
struct RaggedTiles {
  RaggedEntry* list = nullptr;  // of each place, its part; null: there is no list
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
    tile.entry = &list[place];
    tile.entry->find(index, heads, last_first, tile.head, tile.block);
    return true;
  }
};

/// In which order tiles are taken.
struct RaggedOrder {
  static constexpr int kClasses = 256;  // of lengths, eight to an octave
  static constexpr int kMostParts = 4;
  static constexpr int kFewSequences = 32;          // that need no list, and their
  static constexpr int kFewPlaces = (1 << 16) - 1;  // places: see FewSequences
  enum class Of : std::uint8_t { kQueries, kKeys };
  RaggedTiles tiles;
  Of of = Of::kQueries;
  Divisor rows;               // of a block
  Band band;                  // of queries, whatever is listed
  Divisor heads;              // of which there is a tile in each place
  int parts = 1;              // of a sequence, at the most
  int blocks_of_section = 0;  // as many heads stand side by side as have so many blocks
};

}  // namespace flashtile
