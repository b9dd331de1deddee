// The tiles that a thread block of a backward kernel takes: those of the queries that see its block of keys.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/params.h"

namespace flashtile {

/// Block `index` of kN keys, and the tiles of kM queries of all heads of its group that see one of them.
///
/// Blocks stand section by section, a section being `heads_at_once` KV heads side by side: first block 0 of each, which
/// under a causal mask has the most work, and at last the one with the least, so that thread blocks end together.
///
/// Queries come from the first to the last. Under a full mask, where all blocks of a head would begin with the same
/// tile and be in each other's way when they add to dQ, each begins at a place of its own and goes round. Where they
/// add in order they go from the last query to the first, all at the same pace: see SumOfDq.
template <int kM, int kN>
struct KeyBlock {
  int batch, kv_head, n_block, group;
  TileRanges queries;
  int start, step;  // of `queries`: where this block begins, and how it goes on

  CUTE_DEVICE KeyBlock(BackwardParams const& params, int index) : group(params.group) {
    const int of_section = params.heads_at_once * params.n_blocks;
    const int section = index / of_section;
    const int within = index - section * of_section;
    const int first = section * params.heads_at_once;
    const int here = min(params.batch * params.heads_k - first, params.heads_at_once);
    n_block = within / here;
    const int batch_head = first + within - n_block * here;
    batch = batch_head / params.heads_k;
    kv_head = batch_head - batch * params.heads_k;
    const Range keys = {n_block * kN, min((n_block + 1) * kN, params.lengths.k)};
    if (group > 0) queries = params.band.tiles(keys, kM, params.lengths.transposed());
    start = params.deterministic ? queries.visible.end - 1 : queries.visible.begin;
    step = params.deterministic ? -1 : 1;
    if (params.band == Band::full() && !params.deterministic)
      start += int(std::int64_t(n_block) * (queries.visible.end - start) / params.n_blocks);
  }

  /// Calls `visit(head, m_block)` for each tile.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) const {
    int head = kv_head * group;
    int m_block = start;
    CUTE_NO_UNROLL
    for (int left = group * (queries.visible.end - queries.visible.begin); left > 0; --left) {
      visit(head, m_block);
      m_block += step;
      if (m_block == queries.visible.end) m_block = queries.visible.begin;
      if (m_block < queries.visible.begin) m_block = queries.visible.end - 1;
      if (m_block == start) ++head;
    }
  }
};

}  // namespace flashtile
