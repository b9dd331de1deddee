// This file says where a column mask's kinds of blocks lie once a kernel that runs before the attention has found them:
// two bits for each tile and block, so that the attention visits no block that is hidden.
#pragma once

#include <bit>
#include <cstdint>

#include "flashtile/backward_order.h"
#include "flashtile/macros.h"
#include "flashtile/mask/columns.h"
#include "flashtile/plan.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// These count the bits of a word, and those behind its lowest one. What the standard library has for the second is
/// wrong in kernels.
FLASHTILE_HOST_DEVICE int bits_of(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  return __popc(word);
#else
  return std::popcount(word);
#endif
}
FLASHTILE_HOST_DEVICE int lowest_bit_of(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  return __ffs(int(word)) - 1;
#else
  return std::countr_zero(word);
#endif
}

/// MaskWords say which blocks of keys each tile of queries visits, or which blocks of queries each tile of keys. A tile
/// has words with a bit for every interior block, and behind them as many with a bit for every edge block: bit b of
/// word w is block 32 · w + b. A tile of queries takes interior blocks first (MaskedBlocks): they need no test, and all
/// rows see them, so that the first one gives each row of a forward its reference. A tile of keys takes them in
/// ascending order (MaskedBlocksAround).
struct MaskWords {
  static constexpr int kBlocks = 32;  // of a word

  std::uint32_t* data = nullptr;
  int words = 0;   // of each of the two kinds
  int masks = 0;   // heads that have tiles of their own
  int places = 0;  // tiles of a head in all batch entries; of a ragged batch, slots for them (see Spans)
  int rows = 1;    // of a tile

  /// Those of tiles of queries, for all masks of an entry; none where there is no column mask.
  static MaskWords of_queries(const Problem& p, int tile_m, int tile_n) {
    if (!p.column_masked()) return {};
    return {nullptr, words_of(p.seqlen_k, tile_n), p.masks_of_entry, static_cast<int>(p.places_q(tile_m)), tile_m};
  }
  /// Those of tiles of keys, which have one walk for the query heads of a group, though these may have masks of their
  /// own: it visits what one of them sees, and an interior block is one that all of them see.
  static MaskWords of_keys(const Problem& p, int tile_m, int tile_n) {
    if (!p.column_masked()) return {};
    return {nullptr, words_of(p.seqlen_q, tile_m), p.masks_of_entry < p.heads_k ? p.masks_of_entry : p.heads_k,
            static_cast<int>(p.places_k(tile_n)), tile_n};
  }

  std::int64_t bytes() const { return std::int64_t{8} * words * masks * places; }

  /// Returns the words of the tile `block` of a batch entry, whose rows begin at `first_row`.
  FLASHTILE_HOST_DEVICE std::uint32_t* of_tile(Spans const& spans, int batch, int first_row, int mask,
                                               int block) const {
    return of_place(spans.first_place(batch, first_row, rows) + block, mask);
  }
  FLASHTILE_HOST_DEVICE std::uint32_t* of_place(int place, int mask) const {
    return data + (std::int64_t(mask) * places + place) * 2 * words;
  }

  /// Returns the walk of a tile by steps, of which each visits a block, interior ones first.
  FLASHTILE_HOST_DEVICE BlockWalk steps(const std::uint32_t* of_tile) const {
    int edges = 0, interiors = 0;
    FLASHTILE_NO_UNROLL
    for (int i = 0; i < words; ++i) interiors += bits_of(of_tile[i]), edges += bits_of(of_tile[words + i]);
    return {{0, interiors + edges}, {0, interiors}};
  }

  /// Returns a bit for each of the blocks from kBlocks · `word` on that a tile visits.
  FLASHTILE_HOST_DEVICE std::uint32_t visited(const std::uint32_t* of_tile, int word) const {
    return of_tile[word] | of_tile[words + word];
  }
  /// Returns whether a tile visits `block`.
  FLASHTILE_HOST_DEVICE bool visits(const std::uint32_t* of_tile, int block) const {
    return (visited(of_tile, block / kBlocks) >> (block % kBlocks) & 1) != 0;
  }
  /// Returns how many blocks a tile visits.
  FLASHTILE_HOST_DEVICE int count(const std::uint32_t* of_tile) const {
    int blocks = 0;
    FLASHTILE_NO_UNROLL
    for (int word = 0; word < words; ++word) blocks += bits_of(visited(of_tile, word));
    return blocks;
  }
  /// Returns the first block that a tile visits from `from` on, or around; there has to be one.
  FLASHTILE_HOST_DEVICE int first_around(const std::uint32_t* of_tile, int from) const {
    int word = from / kBlocks;
    std::uint32_t left = visited(of_tile, word) & ~0u << (from % kBlocks);
    FLASHTILE_NO_UNROLL
    while (left == 0) {
      if (++word == words) word = 0;
      left = visited(of_tile, word);
    }
    return kBlocks * word + lowest_bit_of(left);
  }

  /// Returns how many of the blocks before `block` a tile visits.
  FLASHTILE_HOST_DEVICE int visited_before(const std::uint32_t* of_tile, int block) const {
    int blocks = 0;
    FLASHTILE_NO_UNROLL
    for (int i = 0; i * kBlocks < block; ++i) {
      const int left = block - i * kBlocks;
      const std::uint32_t before = left < kBlocks ? (1u << left) - 1 : ~0u;
      blocks += bits_of(visited(of_tile, i) & before);
    }
    return blocks;
  }

 private:
  static int words_of(int columns, int tile) { return Spans::tiles(Spans::tiles(columns, tile), kBlocks); }
};

/// MaskOrder is the order in which a forward takes the tiles of queries of a dense batch under a column mask: by their
/// work, which only the GPU knows, the longest first, so that thread blocks end together.
struct MaskOrder {
  int* at = nullptr;  // whether sections come in parts (see BlockOfSection); then each batch entry's tiles

  /// Returns which of an entry's `tiles` tiles takes the place that tile `rank` has under a causal mask. The last place
  /// has the longest tile.
  FLASHTILE_HOST_DEVICE int tile(int batch, int rank, int tiles) const { return at[1 + batch * tiles + rank]; }
  FLASHTILE_HOST_DEVICE bool in_parts() const { return at[0] != 0; }
};

/// These are the heads of a section, and the thread blocks that take its tiles; no heads where there are no sections.
struct TilesAtOnce {
  int heads = 0;
  int thread_blocks = 1;
};

/// MaskTables are what the kernels ahead of an attention find of a column mask, in the workspace: the words of tiles of
/// keys, of tiles of queries, or of both, before them the HiddenBounds of each block of keys, and for a dense forward
/// the order of its tiles behind them.
struct MaskTables {
  MaskWords keys, queries;
  MaskOrder order;
  bool ordered = false;            // whether there is an order
  HiddenBounds* bounds = nullptr;  // (masks of an entry, places)
  int masks = 0;
  int places = 0;  // as MaskWords have it
  int tile_n = 1;  // keys of a block

  static MaskTables of_forward(const Problem& p, const Variant& v, void* at) {
    MaskTables tables(p, v);
    tables.queries = MaskWords::of_queries(p, v.tile_m, v.tile_n);
    tables.ordered = p.column_masked() && !p.ragged;
    return tables.placed(at);
  }
  /// Returns those of both passes of a backward, or of the only one, which is over blocks of keys. Where that one sums
  /// dQ in order, the words of queries say when a block of keys adds to a tile (see KeyBlock::turn()).
  static MaskTables of_backward(const Problem& p, const Variant& v, void* at) {
    MaskTables tables(p, v);
    tables.keys = MaskWords::of_keys(p, queries_of_step(v), v.tile_n);
    if (v.two_passes() || p.deterministic) tables.queries = MaskWords::of_queries(p, v.tile_m, v.tile_n);
    if (!v.two_passes()) tables.queries.masks = tables.queries.masks > 0 ? tables.keys.masks : 0;
    return tables.placed(at);
  }

  std::int64_t bytes() const {
    return bounds_bytes() + keys.bytes() + queries.bytes() + (ordered ? 4 * (1 + std::int64_t{queries.places}) : 0);
  }

 private:
  MaskTables(const Problem& p, const Variant& v) {
    if (!p.column_masked()) return;
    masks = p.masks_of_entry;
    places = static_cast<int>(p.places_k(v.tile_n));
    tile_n = v.tile_n;
  }
  std::int64_t bounds_bytes() const { return std::int64_t{sizeof(HiddenBounds)} * masks * places; }
  MaskTables placed(void* at) const {
    MaskTables tables = *this;
    if (masks == 0) return tables;
    char* const begin = static_cast<char*>(at);
    tables.bounds = reinterpret_cast<HiddenBounds*>(begin);
    tables.keys.data = reinterpret_cast<std::uint32_t*>(begin + bounds_bytes());
    tables.queries.data = reinterpret_cast<std::uint32_t*>(begin + bounds_bytes() + keys.bytes());
    if (ordered) tables.order.at = reinterpret_cast<int*>(begin + bounds_bytes() + keys.bytes() + queries.bytes());
    return tables;
  }
};

/// MaskedBlocks are the blocks that a tile visits under a column mask, in the order of its steps.
struct MaskedBlocks {
  const std::uint32_t* words = nullptr;
  int at = -1;             // which of the words
  std::uint32_t left = 0;  // of its bits

  /// Returns the next block, of which there has to be one. There are `count` words of each kind.
  FLASHTILE_HOST_DEVICE int next(int count) {
    while (left == 0) left = words[++at];
    const int bit = lowest_bit_of(left);
    left &= left - 1;
    return MaskWords::kBlocks * (at < count ? at : at - count) + bit;
  }
};

/// MaskedBlocksAround are the blocks that a tile visits under a column mask where interior ones need not come first: in
/// ascending order from `start` on, which is one of them, and around. They leave the tile's words, of which there are
/// `count` of each kind, to the caller, who may be short of registers.
class MaskedBlocksAround {
 public:
  struct Block {
    int index;
    bool edge;
  };

  MaskedBlocksAround() = default;
  FLASHTILE_HOST_DEVICE MaskedBlocksAround(const std::uint32_t* words, int count, int start)
      : at_(start / MaskWords::kBlocks) {
    load(words, count);
    left_ &= ~0u << (start % MaskWords::kBlocks);
  }

  /// Returns the next block, of which there has to be one.
  FLASHTILE_HOST_DEVICE Block next(const std::uint32_t* words, int count) {
    FLASHTILE_NO_UNROLL
    while (left_ == 0) {
      if (++at_ == count) at_ = 0;
      load(words, count);
    }
    const int bit = lowest_bit_of(left_);
    left_ &= left_ - 1;
    return {MaskWords::kBlocks * at_ + bit, (edges_ >> bit & 1) != 0};
  }

 private:
  FLASHTILE_HOST_DEVICE void load(const std::uint32_t* words, int count) {
    edges_ = words[count + at_];
    left_ = words[at_] | edges_;
  }

  int at_ = 0;               // which of the words of each kind
  std::uint32_t left_ = 0;   // of the bits of both
  std::uint32_t edges_ = 0;  // those of edge blocks
};

/// Launches the kernels that find them: one for the bounds, one for the words of each side, and one for the order.
void find_mask_tables(const MaskTables& tables, const Variant& variant, const ColumnRanges& columns,
                      const Problem& problem, const Sequences& sequences, TilesAtOnce at_once, Stream stream);

}  // namespace flashtile
