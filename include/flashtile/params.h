// This file flattens plan and tensors into what a kernel is launched with: pointers, strides and run-time options.
#pragma once

#include <cstdint>

#include "flashtile/cuda/marked_count.h"
#include "flashtile/forward_parts.h"
#include "flashtile/mask/columns.h"
#include "flashtile/mask_words.h"
#include "flashtile/math/dropout.h"
#include "flashtile/math/head_packing.h"
#include "flashtile/math/score_params.h"
#include "flashtile/plan.h"
#include "flashtile/row_results.h"
#include "flashtile/scheduler/ragged.h"
#include "flashtile/scheduler/sections.h"
#include "flashtile/scheduler/single.h"
#include "flashtile/sequence.h"
#include "flashtile/workspace.h"

namespace flashtile {

/// These are the strides, in elements, of a (B, S, H, D) tensor whose last dimension is contiguous; a ragged tensor has
/// B = 1 and a batch stride of 0.
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
  const void* q;       // (B, S_q, H_q, D)
  const void* k;       // (B, S_k, H_k, D)
  const void* v;       // (B, S_k, H_k, D_v)
  void* out;           // (B, S_q, H_q, D_v)
  const float* sinks;  // one per query head, or null
  Strides q_strides, k_strides, v_strides, out_strides;
  RowResults rows;
  Sequences sequences;
  ScoreParams<HeadPacking> scores;  // where heads are packed, the `head` of a tile counts packs
  ColumnRanges columns;             // none where there is no column mask, as the next
  MaskTables mask_tables;
  Dropout dropout;
  Divisor group;  // query heads per KV head
  int head_dim;   // of Q and K
  int head_dim_v;
  SingleTileScheduler scheduler;  // of a dense batch in a kernel with one thread block per tile
  RaggedOrder ragged;             // of a ragged batch; its `heads` counts packs
  ForwardParts parts;

  /// `memory` is the workspace: the list of ragged tiles lies at its beginning.
  static ForwardParams of(const ForwardPlan& plan, const ForwardTensors& t, void* memory) {
    const Problem& p = plan.problem;
    return {
        .q = t.q.data,
        .k = t.k.data,
        .v = t.v.data,
        .out = t.out.data,
        .sinks = t.sinks.given() ? static_cast<const float*>(t.sinks.data) : nullptr,
        .q_strides = Strides::of(t.q),
        .k_strides = Strides::of(t.k),
        .v_strides = Strides::of(t.v),
        .out_strides = Strides::of(t.out),
        .rows = RowResults::of(p, t),
        .sequences = p.sequences(t),
        .scores = {p.score_map(), p.mask(), plan.packing, AlibiSlopes::of(t.alibi_slopes)},
        .columns = ColumnRanges::of(t.mask, p.heads_q),
        .mask_tables = MaskTables::of_forward(p, plan.variant, static_cast<char*>(memory) + plan.mask_tables_at),
        .dropout = p.dropout,
        .group = Divisor(p.group()),
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .scheduler = {p.heads_q, plan.m_blocks},
        .ragged = {.tiles = p.ragged && plan.lists ? RaggedTiles::at(memory, plan.m_blocks) : RaggedTiles{},
                   .of = RaggedOrder::Of::kQueries,
                   .rows = Divisor(plan.packing.queries_of(plan.variant.tile_m)),
                   .mask = p.mask(),
                   .heads = Divisor(plan.packing.packs_of(p.heads_q)),
                   .parts = plan.parts_of_sequence,
                   .blocks_of_section = plan.blocks_of_section},
        .parts = ForwardParts::of(plan, memory),
    };
  }

  /// Returns whether thread block `index` has a tile, and sets which, in a kernel with one thread block per tile.
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

/// A backward kernel is launched with this. The rows of score tiles are keys, for which `scores` is transposed, except
/// in a pass that forms dQ alone.
struct BackwardParams {
  const void* q;       // (B, S_q, H_q, D)
  const void* k;       // (B, S_k, H_k, D)
  const void* v;       // (B, S_k, H_k, D_v)
  const void* out;     // (B, S_q, H_q, D_v)
  const void* dout;    // (B, S_q, H_q, D_v)
  const float* dlse;   // (B, H_q, S_q) contiguous, or null
  const float* sinks;  // one per query head, or null
  void* dq;            // like q; null where the gradient is not wanted, as for the others
  void* dk;            // like k
  void* dv;            // like v
  float* dsinks;       // like sinks
  Strides q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides;
  RowResults rows;
  Lengths lengths;  // of a dense batch
  Sequences sequences;
  ScoreParams<NoPacking> scores;  // transposed: a row is a key
  ColumnRanges columns;           // none where there is no column mask, as the next
  MaskTables mask_tables;
  Dropout dropout;
  float scale;
  bool deterministic;
  int batch;
  int heads;     // query heads
  int heads_k;   // KV heads
  int group;     // query heads per KV head; may be 0
  int head_dim;  // of Q and K
  int head_dim_v;
  int m_blocks;       // tiles of query rows in one head; of a ragged batch, slots for them (see Spans)
  int n_blocks;       // tiles of keys in one head
  int heads_at_once;  // KV heads whose key blocks are interleaved: see KeyBlock
  Divisor parts;      // thread blocks that share the queries of a block of keys: see KeyBlock
  // With several parts, tiles of float32 of each, before the scale (see BackwardWorkspace): null with one.
  float* partial_dk;
  float* partial_dv;
  RaggedTiles ragged_queries, ragged_keys;
  // This counts the tiles asked for so far, as RaggedTiles has it, of dense batches too: blocks of keys, and after them
  // the tiles of queries of a second pass.
  int* taken;
  BackwardWorkspace workspace;
  void* memory;   // where `workspace` lies
  unsigned mark;  // a number that no other launch has: see BackwardWorkspace

  /// Returns the workspace's index of the first tile of a head: in a dense batch, or of one sequence of a ragged one.
  FLASHTILE_HOST_DEVICE std::int64_t workspace_tile(int batch, int head) const {
    return (std::int64_t(batch) * heads + head) * m_blocks;
  }
  FLASHTILE_HOST_DEVICE std::int64_t workspace_tile(int batch, int head, Span queries) const {
    return std::int64_t(head) * m_blocks + sequences.q.first_place(batch, queries.first, workspace.tile_m);
  }

  /// Returns whether any row is steep (see math/state.h): its weights need more than the lse_log2 of the row. Each
  /// thread of Hopper's kernels reads this once: read for every key block, it kept the first weights waiting for
  /// memory.
  FLASHTILE_HOST_DEVICE bool steep() const { return *workspace.steep(memory) == mark; }

  /// This is one tile of queries of one head.
  struct QueryTile {
    int batch, head, m_block;
    Sequence sequence;
    std::int64_t place;  // index of the tile in the workspace

    /// Returns the walk over the key blocks that rows of the tile see.
    FLASHTILE_HOST_DEVICE BlockWalk keys(BackwardParams const& params, int tile_m, int tile_n) const {
      const int end = (m_block + 1) * tile_m;
      const Range rows = {m_block * tile_m, end < sequence.q.used ? end : sequence.q.used};
      return params.scores.mask.transposed().walk(rows, tile_n, sequence.lengths());
    }
  };

  /// Returns whether there is a query tile `index`, in the order in which kernels take them, and sets which.
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

  /// This is one block of keys of one KV head.
  struct KeyTile {
    int batch, kv_head, n_block;
    int blocks_of_sequence;
    Sequence sequence;
  };

  /// Returns the block of keys `index` of a dense batch, in the order in which kernels take them.
  FLASHTILE_HOST_DEVICE KeyTile dense_key_tile(unsigned index) const {
    const auto found = BlockOfSection::at(index, batch * heads_k, n_blocks, heads_at_once);
    const int entry = found.head / heads_k;
    return {entry, found.head - entry * heads_k, found.rank, n_blocks, sequences.at(entry)};
  }

  /// Returns whether there is a block of keys `index`, and sets which.
  FLASHTILE_HOST_DEVICE bool find_key_tile(unsigned index, KeyTile& tile) const {
    if (ragged_keys.given()) {
      RaggedTile found;
      if (!ragged_keys.find(index, heads_k, false, found)) return false;
      const RaggedEntry& entry = *found.entry;
      tile = {entry.batch, found.head, found.block, entry.blocks_of_sequence, entry.sequence};
    } else {
      tile = dense_key_tile(index);
    }
    return true;
  }

  static BackwardParams of(const BackwardPlan& plan, const BackwardTensors& t, void* memory) {
    const Problem& p = plan.problem;
    const ForwardTensors& f = t.forward;
    const ScoreParams<NoPacking> scores{p.score_map(), p.mask(), {}, AlibiSlopes::of(f.alibi_slopes)};
    const BackwardWorkspace workspace = BackwardWorkspace::of(p, plan.variant, plan.parts);
    const auto floats = [](const TensorView& x) { return x.given() ? static_cast<const float*>(x.data) : nullptr; };
    return {
        .q = f.q.data,
        .k = f.k.data,
        .v = f.v.data,
        .out = f.out.data,
        .dout = t.dout.data,
        .dlse = floats(t.dlse),
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
        .lengths = p.lengths(),
        .sequences = p.sequences(f),
        .scores = scores.transposed(),
        .columns = ColumnRanges::of(f.mask, p.heads_q),
        .mask_tables = MaskTables::of_backward(p, plan.variant, static_cast<char*>(memory) + plan.mask_tables_at),
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
        .parts = Divisor(plan.parts),
        .partial_dk = workspace.partial_dk(memory),
        .partial_dv = workspace.partial_dv(memory),
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
