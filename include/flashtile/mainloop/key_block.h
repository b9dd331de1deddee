// A thread block of a backward kernel takes one KeyBlock at a time: a block of keys and the queries that see it.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/load/tma.h"
#include "flashtile/params.h"
#include "flashtile/scheduler/sections.h"

namespace flashtile {

/// KeyBlock is a block of kN keys, and the tiles of kM queries of all heads of its group that see one of them.
///
/// In a dense batch blocks are ordered section by section (see BlockOfSection): first comes block 0 of each KV head,
/// which has the most work under a causal mask, and at last the one with the least, so that thread blocks end together.
///
/// Queries go from the first to the last. Under a full mask all blocks of a head would begin with the same tile, and
/// contend when they add to dQ: so each begins with a tile of its own and wraps around. Where they add in order they go
/// from the last query to the first: see SumOfDq. (Ampere's kernel always begins with the first or the last.)
///
/// With kRagged, sequences may be ragged. A kernel that never sees such has their lengths among its parameters.
template <int kM, int kN, bool kRagged>
struct KeyBlock {
  int batch, kv_head, n_block, group;
  BlockWalk queries;
  int start, step;  // first tile of `queries` for this block, and the direction: 1 or −1
  int first_tile;   // first tile of all heads' queries in the workspace
  struct Nothing {};
  [[no_unique_address]] std::conditional_t<kRagged, Sequence, Nothing> sequence;

  KeyBlock() = default;

  /// Makes block `index` of a dense batch.
  CUTE_DEVICE KeyBlock(BackwardParams const& params, int index) {
    const auto found = BlockOfSection::at(index, params.batch * params.heads_k, params.n_blocks, params.heads_at_once);
    n_block = found.rank;
    batch = found.head / params.heads_k;
    kv_head = found.head - batch * params.heads_k;
    if constexpr (kRagged) sequence = params.sequences.at(batch);
    first_tile = batch * params.heads * params.m_blocks;
    find_queries(params, params.n_blocks);
  }

  /// Returns whether there is a block `index`, and if so sets *this to it.
  CUTE_DEVICE bool find(BackwardParams const& params, int index) {
    if (!kRagged || !params.ragged_keys.given()) {
      *this = KeyBlock(params, index);
      return true;
    }
    RaggedTile tile;
    if (!params.ragged_keys.find(index, params.heads_k, false, tile)) return false;
    batch = tile.entry->batch;
    kv_head = tile.head;
    n_block = tile.block;
    if constexpr (kRagged) {
      sequence = tile.entry->sequence;
      first_tile = params.sequences.q.first_place(batch, sequence.q.first, params.workspace.tile_m);
    }
    find_queries(params, tile.entry->blocks_of_sequence);
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

  /// Returns how many tiles of queries there are.
  CUTE_DEVICE int steps() const { return group * queries.blocks(); }

  /// Calls `visit(head, m_block)` for each tile.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) const {
    int head = kv_head * group;
    int m_block = start;
    CUTE_NO_UNROLL
    for (int left = steps(); left > 0; --left) {
      visit(head, m_block);
      m_block = queries.next_around(m_block, step);
      if (m_block == start) ++head;
    }
  }

 private:
  CUTE_DEVICE void find_queries(BackwardParams const& params, int n_blocks) {
    group = params.group;
    const Lengths lengths = this->lengths(params);
    const Range keys = {n_block * kN, min((n_block + 1) * kN, lengths.k)};
    queries = {};
    if (group > 0) queries = params.scores.mask.walk(keys, kM, lengths.transposed());
    start = params.deterministic ? queries.last() : queries.first();
    step = params.deterministic ? -1 : 1;
    // First tiles are spread as evenly as can be. The quotient is approximate, as a 64-bit one would be a call.
    if (params.scores.mask.shows_all() && !params.deterministic)
      start += int(__umulhi(unsigned(queries.end() - start), unsigned(n_block) * (~0u / unsigned(n_blocks))));
  }
};

}  // namespace flashtile
