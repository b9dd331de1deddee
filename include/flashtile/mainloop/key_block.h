// A thread block of a backward kernel takes one KeyBlock at a time: a block of keys and the queries that see it.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/load/tma.h"
#include "flashtile/params.h"
#include "flashtile/scheduler/group_walk.h"

namespace flashtile {

/// ColumnMasks says whether a kernel serves calls with a column mask: none, as the call asks, or no others.
enum class ColumnMasks { kNever, kAsAsked, kAlways };

/// KeyBlock is a block of kN keys, and the tiles of kM queries of all heads of its group that see one of them, or a
/// part of these tiles: where blocks of keys are too few for the GPU, each is the work of `params.parts` thread blocks.
/// They leave what they contribute to dK and dV in the workspace, where join_gradients finds it.
///
/// In a dense batch blocks are ordered section by section (see BlockOfSection): first comes block 0 of each KV head,
/// which has the most work under a causal mask, and at last the one with the least, so that thread blocks end together.
///
/// Queries go from the first to the last. Blocks of a head that see its first query, as all do under a full mask, would
/// begin with the same tile, and contend when they add to dQ: so each begins with a tile of its own and wraps around.
/// Where they add in order they go from the last query to the first: see SumOfDq. They take all heads of a tile, then
/// those of the next. So a block follows the one before it, and sees more queries under a causal mask, a step apart
/// from its first tile to its last; through one head after the other it would wait for it with each head anew.
///
/// The parts of a block are neighbours in the order. So a block's parts come after all parts of the blocks before it of
/// the same head, and a part that waits for the sum of another block only ever waits for one that comes before it. It
/// should be of the same queries, too, or it would wait for most of that part: under a mask, where the walks of blocks
/// differ, parts that add in order have whole heads.
///
/// With kRagged, sequences may be ragged. A kernel that never sees such has their lengths among its parameters. With
/// kKnowsOrder blocks add in order where the call asks for that; other kernels have no code of it. Without
/// kTurns, all blocks begin with the first or the last tile. Under a column mask, for which kColumns asks, steps go
/// through the tiles that MaskWords have. What the mask is like is not known, so each block begins where it meets the
/// queries of its own keys, as it does under a causal mask, and wraps around, unless it adds in order.
template <int kM, int kN, bool kRagged, bool kKnowsOrder, bool kTurns = true,
          ColumnMasks kColumns = ColumnMasks::kNever>
struct KeyBlock : GroupWalk {
  static constexpr bool kMayMask = kColumns != ColumnMasks::kNever;
  int batch, kv_head, n_block;
  int place;       // among the parts of all blocks, of which one thread block takes this one
  int first_tile;  // first tile of all heads' queries in the workspace
  struct Nothing {};
  [[no_unique_address]] std::conditional_t<kRagged, Sequence, Nothing> sequence;
  /// MaskedTiles are those that see the block under a column mask.
  struct MaskedTiles {
    const std::uint32_t* words;
    int first;  // of the walk over each head
  };
  struct AllTiles {};
  [[no_unique_address]] std::conditional_t<kMayMask, MaskedTiles, AllTiles> masked_tiles;

  KeyBlock() = default;

  /// Makes part `index` of all parts of all blocks of a dense batch.
  CUTE_DEVICE KeyBlock(BackwardParams const& params, int index) : place(index) {
    take(params, params.dense_key_tile(params.parts.quotient(index)));
    first_tile = batch * params.heads * params.m_blocks;
    find_queries(params, params.n_blocks);
  }

  /// Returns whether there is a part `index`, and if so sets *this to it.
  CUTE_DEVICE bool find(BackwardParams const& params, int index) {
    if (!kRagged || !params.ragged_keys.given()) {
      *this = KeyBlock(params, index);
      return true;
    }
    BackwardParams::KeyTile tile;
    if (!params.find_key_tile(params.parts.quotient(index), tile)) return false;
    place = index;
    take(params, tile);
    if constexpr (kRagged)
      first_tile = params.sequences.q.first_place(batch, sequence.q.first, params.workspace.tile_m);
    find_queries(params, tile.blocks_of_sequence);
    return true;
  }

  CUTE_DEVICE Lengths lengths(BackwardParams const& params) const {
    if constexpr (kRagged)
      return sequence.lengths();
    else
      return params.lengths;
  }
  CUTE_DEVICE Span span_of_keys(BackwardParams const& params) const {
    if constexpr (kRagged)
      return sequence.k;
    else
      return {0, params.lengths.k, params.lengths.k};
  }
  CUTE_DEVICE TmaRows q_rows(BackwardParams const& params) const {
    if constexpr (kRagged)
      return TmaRows::of(params.sequences.q, batch, sequence.q, sequence.q.used);
    else
      return TmaRows::dense(batch);
  }
  CUTE_DEVICE TmaRows k_rows(BackwardParams const& params) const {
    if constexpr (kRagged)
      return TmaRows::of(params.sequences.k, batch, sequence.k, sequence.k.used);
    else
      return TmaRows::dense(batch);
  }
  /// Returns the index of a tile of queries in the workspace.
  CUTE_DEVICE int workspace_tile(BackwardParams const& params, int head, int m_block) const {
    return first_tile + head * params.m_blocks + m_block;
  }

  /// Returns whether there is a column mask.
  CUTE_DEVICE bool masked() const {
    if constexpr (kColumns == ColumnMasks::kAsAsked)
      return masked_tiles.words != nullptr;
    else
      return kMayMask;
  }

  /// Returns when this block adds to dQ of a tile of queries, where sums are in order (see SumOfDq): block after block,
  /// and under a column mask after how many others, as a block that is hidden from the tile never adds.
  CUTE_DEVICE int turn(BackwardParams const& params, int m_block) const {
    if constexpr (kMayMask) {
      const MaskWords& all = params.mask_tables.queries;
      if (masked()) {
        const int first_query = params.sequences.q.at(batch).first;
        return all.visited_before(all.of_tile(params.sequences.q, batch, first_query, mask_of(all), m_block), n_block);
      }
    }
    return n_block;
  }

  /// Returns whether the walk goes by tiles, which kernels that do not know sums in order need not ask.
  CUTE_DEVICE bool goes_by_tiles() const { return kKnowsOrder && by_tiles; }

  /// Finds the steps of the part, once all else is known.
  CUTE_DEVICE void take_part(BackwardParams const& params) {
    by_tiles = in_order(params);
    const bool whole_heads = by_tiles && (masked() || !params.scores.mask.shows_all());
    cut(kv_head * params.group, params.group, params.parts.remainder(place), params.parts, whole_heads);
  }

  /// Calls `visit(head, m_block, whether the tile is at an edge of the mask)` for each tile.
  template <class Visit>
  CUTE_DEVICE void for_each_tile(BackwardParams const& params, Visit&& visit) const {
    if constexpr (kColumns == ColumnMasks::kAlways) {
      MaskedBlocksAround tiles = tiles_of_head(params);
      MaskedBlocksAround::Block tile;
      for (int i = 0; i < first_tile_of_head; ++i) next(tiles, params);
      int last = -1;
      for_each([&](int head, int index) __attribute__((always_inline)) {
        if (index != last || !goes_by_tiles()) {
          if (index == 0) tiles = tiles_of_head(params);
          tile = next(tiles, params);
          last = index;
        }
        visit(head, tile.index, tile.edge);
      });
    } else {
      for_each([&](int head, int m_block)
                   __attribute__((always_inline)) { visit(head, m_block, queries.is_edge(m_block)); });
    }
  }

  /// Does so for each step, which is a tile, but under a column mask: there `index` counts the tiles of a head.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) const {
    int inner = goes_by_tiles() ? first_head : first_tile_of_head;
    int outer = goes_by_tiles() ? first_tile_of_head : first_head;
    CUTE_NO_UNROLL
    for (int left = steps; left > 0; --left) {
      visit(goes_by_tiles() ? inner : outer, goes_by_tiles() ? outer : inner);
      if constexpr (kColumns == ColumnMasks::kAlways && !kKnowsOrder) {
        if (++inner == queries.end()) inner = 0, ++outer;  // from 0 on: producers and writers have few registers
      } else {
        advance(inner, outer);
      }
    }
  }

  /// Returns the tiles that see the block, of which there has to be one, under a column mask.
  CUTE_DEVICE MaskedBlocksAround tiles_of_head(BackwardParams const& params) const {
    return {masked_tiles.words, params.mask_tables.keys.words, masked_tiles.first};
  }
  CUTE_DEVICE MaskedBlocksAround::Block next(MaskedBlocksAround& tiles, BackwardParams const& params) const {
    return tiles.next(masked_tiles.words, params.mask_tables.keys.words);
  }

  /// Returns the tile of the first step, of which there has to be one, under a column mask.
  CUTE_DEVICE int first_masked_tile(BackwardParams const& params) const {
    if (first_tile_of_head == 0) return masked_tiles.first;
    MaskedBlocksAround tiles = tiles_of_head(params);
    for (int i = 0; i < first_tile_of_head; ++i) next(tiles, params);
    return next(tiles, params).index;
  }

 private:
  CUTE_DEVICE void take(BackwardParams const& params, BackwardParams::KeyTile const& tile) {
    batch = tile.batch;
    kv_head = tile.kv_head;
    n_block = tile.n_block;
    if constexpr (kRagged) sequence = tile.sequence;
  }

  /// Returns whether blocks of keys add to dQ in order.
  CUTE_DEVICE static bool in_order(BackwardParams const& params) { return kKnowsOrder && params.deterministic; }

  /// Returns which mask of `all` is that of the KV head.
  CUTE_DEVICE int mask_of(MaskWords const& all) const { return all.masks == 1 ? 0 : kv_head; }

  /// Returns the tile of queries from which on a walk under a column mask begins.
  CUTE_DEVICE int first_to_ask(BackwardParams const& params) const {
    if (!kTurns || in_order(params)) return 0;
    return n_block * kN / kM % max((lengths(params).q + kM - 1) / kM, 1);
  }

  CUTE_DEVICE void find_queries(BackwardParams const& params, int n_blocks) {
    if constexpr (kMayMask) {
      const MaskWords& all = params.mask_tables.keys;
      masked_tiles = {};
      if (kColumns == ColumnMasks::kAlways || all.data != nullptr) {
        const auto* words = all.of_tile(params.sequences.k, batch, sequence.k.first, mask_of(all), n_block);
        queries = {{0, all.count(words)}, {}};
        start = 0;
        direction = 1;
        masked_tiles = {words, 0};
        if (!queries.empty()) masked_tiles.first = all.first_around(words, first_to_ask(params));
        return take_part(params);
      }
    }
    const Lengths lengths = this->lengths(params);
    const Range keys = {n_block * kN, min((n_block + 1) * kN, lengths.k)};
    queries = {};
    if (params.group > 0) queries = params.scores.mask.walk(keys, kM, lengths.transposed());
    start = in_order(params) ? queries.last() : queries.first();
    direction = -1;  // by tiles, as in order
    // Their first tiles are spread as evenly as can be, but no further apart than two tiles from block to block, so
    // that what one of them has read and added to is still in the L2 cache when the next comes to it. The quotient is
    // approximate, as a 64-bit one would be a call.
    if (kTurns && queries.first() == 0 && !in_order(params)) {
      const int even = int(__umulhi(unsigned(queries.end()), unsigned(n_block) * (~0u / unsigned(n_blocks))));
      start += min(even, 2 * n_block);
    }
    take_part(params);
  }
};

/// Hides the scores of the keys of a block from its `keys`-th on, which would add to dQ: a row is a key. This apart
/// from the mask, for which most blocks have no need of a test for each element.
template <class Scores, class Coord>
CUTE_DEVICE void hide_keys_behind(int keys, Scores& scores, Coord const& coord) {
  using namespace cute;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    if (get<0>(coord(r, 0)) < keys) continue;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) scores(r, c) = -kInfinity;
  }
}

}  // namespace flashtile
