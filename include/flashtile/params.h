// What a kernel is launched with: pointers, strides and run-time options, flattened from plan and tensors.
#pragma once

#include <cstdint>

#include "flashtile/cuda/marked_count.h"
#include "flashtile/math/dropout.h"
#include "flashtile/math/head_packing.h"
#include "flashtile/math/mask.h"
#include "flashtile/math/softmax.h"
#include "flashtile/plan.h"
#include "flashtile/row_results.h"
#include "flashtile/scheduler/ragged.h"
#include "flashtile/scheduler/single.h"
#include "flashtile/sequence.h"
#include "flashtile/workspace.h"

namespace flashtile {

/// Strides in elements of a (B, S, H, D) tensor whose last dimension is contiguous; of a ragged one, B is 1 and its
/// stride 0.
struct Strides {
  std::int64_t batch = 0;
  std::int64_t row = 0;
  std::int64_t head = 0;

  static Strides of(const TensorView& t) { return {t.strides[0], t.strides[1], t.strides[2]}; }
  FLASHTILE_HOST_DEVICE std::int64_t at(int batch_index, int row_index) const {
    return batch_index * batch + row_index * row;
  }
};

struct ForwardParams {
  const void* q;              // (B, S_q, H_q, D)
  const void* k;              // (B, S_k, H_k, D)
  const void* v;              // (B, S_k, H_k, D_v)
  void* out;                  // (B, S_q, H_q, D_v)
  const float* alibi_slopes;  // one per (batch, query head), or null
  const float* sinks;         // one per query head, or null
  Strides q_strides, k_strides, v_strides, out_strides;
  RowResults rows;
  std::int64_t alibi_batch_stride, alibi_head_stride;
  Sequences sequences;
  Band band;
  ScoreMap score_map;
  Dropout dropout;
  Divisor group;        // query heads per KV head
  HeadPacking packing;  // of the rows of a tile, whose `head` counts packs
  int head_dim;         // of Q and K
  int head_dim_v;
  SingleTileScheduler scheduler;  // of a dense batch, where a thread block has one tile
  RaggedOrder ragged;             // of a ragged one, whose heads are packs of them

  /// `memory`: of the list of ragged tiles.
  static ForwardParams of(const ForwardPlan& plan, const ForwardTensors& t, void* memory) {
    const Problem& p = plan.problem;
    const TensorView& slopes = t.alibi_slopes;
    return {
        .q = t.q.data,
        .k = t.k.data,
        .v = t.v.data,
        .out = t.out.data,
        .alibi_slopes = slopes.given() ? static_cast<const float*>(slopes.data) : nullptr,
        .sinks = t.sinks.given() ? static_cast<const float*>(t.sinks.data) : nullptr,
        .q_strides = Strides::of(t.q),
        .k_strides = Strides::of(t.k),
        .v_strides = Strides::of(t.v),
        .out_strides = Strides::of(t.out),
        .rows = RowResults::of(p, t),
        .alibi_batch_stride = slopes.rank == 2 ? slopes.strides[0] : 0,
        .alibi_head_stride = slopes.given() ? slopes.strides[slopes.rank - 1] : 0,
        .sequences = p.sequences(t),
        .band = p.band,
        .score_map = p.score_map(),
        .dropout = p.dropout,
        .group = Divisor(p.group()),
        .packing = plan.packing,
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .scheduler = {p.heads_q, plan.m_blocks},
        .ragged = {.tiles = p.ragged && plan.lists ? RaggedTiles::at(memory, plan.m_blocks) : RaggedTiles{},
                   .of = RaggedOrder::Of::kQueries,
                   .rows = Divisor(plan.packing.query(plan.variant.tile_m)),
                   .band = p.band,
                   .heads = Divisor(p.heads_q / plan.packing.heads()),
                   .parts = plan.parts_of_sequence,
                   .blocks_of_section = plan.blocks_of_section},
    };
  }

  /// For a kernel with a thread block for each tile: whether there is one for block `index`, and which.
  FLASHTILE_HOST_DEVICE bool find_tile(unsigned index, TileCoord& tile, Sequence& sequence) const {
    if (ragged.tiles.given()) {
      RaggedTile found;
      if (!ragged.tiles.find(index, ragged.heads.value, true, found)) return false;
      tile = {found.entry->batch, found.head, found.block};
      sequence = found.entry->sequence;
    } else {
      tile = scheduler.tile(index);
      sequence = sequences.at(tile.batch);
    }
    return true;
  }
};

/// What a backward kernel is launched with. Rows of its tiles of scores are keys, except in a pass that forms dQ alone.
struct BackwardParams {
  const void* q;              // (B, S_q, H_q, D)
  const void* k;              // (B, S_k, H_k, D)
  const void* v;              // (B, S_k, H_k, D_v)
  const void* out;            // (B, S_q, H_q, D_v)
  const void* dout;           // (B, S_q, H_q, D_v)
  const float* dlse;          // (B, H_q, S_q) contiguous, or null
  const float* alibi_slopes;  // one per (batch, query head), or null
  const float* sinks;         // one per query head, or null
  void* dq;                   // like q; null where not wanted, as the others
  void* dk;                   // like k
  void* dv;                   // like v
  float* dsinks;              // like sinks
  Strides q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides;
  RowResults rows;
  std::int64_t alibi_batch_stride, alibi_head_stride;
  Lengths lengths;  // of a dense batch
  Sequences sequences;
  Band band;            // transposed
  HeadPacking packing;  // none; ScoreTile asks
  ScoreMap score_map;
  Dropout dropout;
  float scale;
  bool deterministic;
  int batch;
  int heads;     // query heads
  int heads_k;   // KV heads
  int group;     // query heads per KV head; may be 0
  int head_dim;  // of Q and K
  int head_dim_v;
  int m_blocks;       // tiles of query rows in one head; of a ragged batch, places
  int n_blocks;       // tiles of keys in one head
  int heads_at_once;  // KV heads whose key blocks take turns: see KeyBlock
  RaggedTiles ragged_queries, ragged_keys;
  int* taken;  // see RaggedTiles; of dense batches too: of blocks of keys, and of a second pass's tiles of queries
  BackwardWorkspace workspace;
  void* memory;   // of `workspace`
  unsigned mark;  // of this launch: see BackwardWorkspace

  /// Where in the workspace the first tile of a head of a dense batch lies, or that of a sequence.
  FLASHTILE_HOST_DEVICE std::int64_t workspace_tile(int batch, int head) const {
    return (std::int64_t(batch) * heads + head) * m_blocks;
  }
  FLASHTILE_HOST_DEVICE std::int64_t workspace_tile(int batch, int head, Span queries) const {
    return std::int64_t(head) * m_blocks + sequences.q.first_place(batch, queries.first, workspace.tile_m);
  }

  /// Whether there are steep rows, whose weights are relative to more than lse_log2 says of a row. Hopper's kernels
  /// read it once a thread: read for each block of keys, it kept the first weights waiting for memory.
  FLASHTILE_HOST_DEVICE bool steep() const { return *workspace.steep(memory) == mark; }

  /// One tile of queries of one head.
  struct QueryTile {
    int batch, head, m_block;
    Sequence sequence;
    std::int64_t place;  // in the workspace, in tiles

    /// The blocks of keys that rows of it see.
    FLASHTILE_HOST_DEVICE TileRanges keys(BackwardParams const& params, int tile_m, int tile_n) const {
      const int end = (m_block + 1) * tile_m;
      const Range rows = {m_block * tile_m, end < sequence.q.used ? end : sequence.q.used};
      return rows.empty() ? TileRanges{} : params.band.transposed().tiles(rows, tile_n, sequence.lengths());
    }
  };

  /// The tiles of queries in the order in which kernels take them: whether there is one `index`, and which.
  FLASHTILE_HOST_DEVICE bool find_query_tile(unsigned index, QueryTile& tile) const {
    if (ragged_queries.given()) {
      RaggedTile found;
      if (!ragged_queries.find(index, heads, true, found)) return false;
      const RaggedEntry& entry = *found.entry;
      tile = {entry.batch, found.head, found.block, entry.sequence,
              workspace_tile(entry.batch, found.head, entry.sequence.q) + found.block};
    } else {
      const TileCoord found = SingleTileScheduler{heads, m_blocks}.tile(index);
      tile = {found.batch,
              found.head,
              found.m_block,
              {{0, lengths.q, lengths.q}, {0, lengths.k, lengths.k}},
              workspace_tile(found.batch, found.head) + found.m_block};
    }
    return true;
  }

  static BackwardParams of(const BackwardPlan& plan, const BackwardTensors& t, void* memory) {
    const Problem& p = plan.problem;
    const ForwardTensors& f = t.forward;
    const TensorView& slopes = f.alibi_slopes;
    const BackwardWorkspace workspace = BackwardWorkspace::of(p, plan.variant);
    const auto floats = [](const TensorView& x) { return x.given() ? static_cast<const float*>(x.data) : nullptr; };
    return {
        .q = f.q.data,
        .k = f.k.data,
        .v = f.v.data,
        .out = f.out.data,
        .dout = t.dout.data,
        .dlse = floats(t.dlse),
        .alibi_slopes = floats(slopes),
        .sinks = floats(f.sinks),
        .dq = t.dq.data,
        .dk = t.dk.data,
        .dv = t.dv.data,
        .dsinks = static_cast<float*>(t.dsinks.data),
        .q_strides = Strides::of(f.q),
        .k_strides = Strides::of(f.k),
        .v_strides = Strides::of(f.v),
        .out_strides = Strides::of(f.out),
        .dout_strides = Strides::of(t.dout),
        .dq_strides = Strides::of(t.dq),
        .dk_strides = Strides::of(t.dk),
        .dv_strides = Strides::of(t.dv),
        .rows = RowResults::of(p, f),
        .alibi_batch_stride = slopes.rank == 2 ? slopes.strides[0] : 0,
        .alibi_head_stride = slopes.given() ? slopes.strides[slopes.rank - 1] : 0,
        .lengths = p.lengths(),
        .sequences = p.sequences(f),
        .band = p.band.transposed(),
        .packing = {},
        .score_map = p.score_map(),
        .dropout = p.dropout,
        .scale = p.scale,
        .deterministic = p.deterministic,
        .batch = p.batch,
        .heads = p.heads_q,
        .heads_k = p.heads_k,
        .group = p.group(),
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .m_blocks = workspace.m_blocks,
        .n_blocks = Spans::tiles(p.seqlen_k, plan.variant.tile_n),
        .heads_at_once = plan.heads_at_once,
        .ragged_queries = workspace.ragged_queries(memory),
        .ragged_keys = workspace.ragged_keys(memory),
        .taken = p.ragged ? workspace.ragged_keys(memory).taken : workspace.taken(memory),
        .workspace = workspace,
        .memory = memory,
        .mark = static_cast<unsigned>(MarkedCount::new_mark()),
    };
  }
};

}  // namespace flashtile
