// The tiles that a thread block of a backward kernel takes: those of the queries that see its block of keys.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/params.h"

namespace flashtile {

/// Block `index` of kN keys, and the tiles of kM queries of all heads of its group that see one of them.
template <int kM, int kN>
struct KeyBlock {
  int batch, kv_head, n_block, group;
  TileRanges queries;

  CUTE_DEVICE KeyBlock(BackwardParams const& params, int index) : group(params.group) {
    const int batch_head = index / params.n_blocks;
    n_block = index - batch_head * params.n_blocks;
    batch = batch_head / params.heads_k;
    kv_head = batch_head - batch * params.heads_k;
    const Range keys = {n_block * kN, min((n_block + 1) * kN, params.lengths.k)};
    if (group > 0) queries = params.band.tiles(keys, kM, params.lengths.transposed());
  }

  /// Calls `visit(head, m_block)` for each tile.
  template <class Visit>
  CUTE_DEVICE void for_each(Visit&& visit) const {
    int head = kv_head * group;
    int m_block = queries.visible.begin;
    CUTE_NO_UNROLL
    for (int left = group * (queries.visible.end - queries.visible.begin); left > 0; --left) {
      visit(head, m_block);
      if (++m_block == queries.visible.end) m_block = queries.visible.begin, ++head;
    }
  }
};

}  // namespace flashtile
