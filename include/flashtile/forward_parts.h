// This file lays out the partial results that the kernels of one forward call share, where its keys are split.
#pragma once

#include <cstdint>

#include "flashtile/cuda/divisor.h"
#include "flashtile/math/state.h"
#include "flashtile/plan.h"
#include "flashtile/scheduler/single.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// These are the partial results of a forward that splits the keys of each tile (Flash-Decoding, Dao et al. 2023): of
/// each tile and split M rows of the output before it is normalised, D_v floats each, and their softmax so far.
struct ForwardParts {
  Divisor splits = Divisor(1);
  float* out = nullptr;       // (tiles, splits, M, head_dim_v)
  RowState* state = nullptr;  // (tiles, splits, M)
  int heads = 0;              // packs of query heads
  int m_blocks = 0;           // tiles of rows in one head; of a ragged batch, slots for them (see Spans)
  int queries = 0;            // queries of a tile

  static std::int64_t bytes(const ForwardPlan& plan) {
    const std::int64_t rows = plan.tiles * plan.variant.tile_m;  // plan.tiles counts splits
    return plan.splits == 1 ? 0 : rows * (4 * plan.problem.head_dim_v + std::int64_t{sizeof(RowState)});
  }
  static ForwardParts of(const ForwardPlan& plan, void* memory) {
    if (plan.splits == 1) return {};
    float* const out = reinterpret_cast<float*>(static_cast<char*>(memory) + plan.parts_at);
    const std::int64_t floats = plan.tiles * plan.variant.tile_m * plan.problem.head_dim_v;
    return {.splits = Divisor(plan.splits),
            .out = out,
            .state = reinterpret_cast<RowState*>(out + floats),
            .heads = plan.packing.packs_of(plan.problem.heads_q),
            .m_blocks = plan.m_blocks,
            .queries = plan.packing.queries_of(plan.variant.tile_m)};
  }

  /// Returns the place of the first split of a tile, whose head is a pack, in units of M rows.
  FLASHTILE_HOST_DEVICE std::int64_t place(Spans const& spans, TileCoord tile, Span own) const {
    const std::int64_t of_tile =
        spans.ragged() ? std::int64_t(tile.head) * m_blocks + spans.first_place(tile.batch, own.first, queries)
                       : (std::int64_t(tile.batch) * heads + tile.head) * m_blocks;
    return (of_tile + tile.m_block) * splits.value;
  }
};

}  // namespace flashtile
