// What a kernel is launched with: pointers, strides and run-time options, flattened from plan and tensors.
#pragma once

#include <cstdint>

#include "flashtile/math/dropout.h"
#include "flashtile/math/head_packing.h"
#include "flashtile/math/mask.h"
#include "flashtile/math/softmax.h"
#include "flashtile/plan.h"
#include "flashtile/scheduler/single.h"
#include "flashtile/workspace.h"

namespace flashtile {

/// Strides in elements of a (B, S, H, D) tensor whose last dimension is contiguous.
struct Strides {
  std::int64_t batch = 0;
  std::int64_t row = 0;
  std::int64_t head = 0;

  static Strides of(const TensorView& t) { return {t.strides[0], t.strides[1], t.strides[2]}; }
};

struct ForwardParams {
  const void* q;              // (B, S_q, H_q, D)
  const void* k;              // (B, S_k, H_k, D)
  const void* v;              // (B, S_k, H_k, D_v)
  void* out;                  // (B, S_q, H_q, D_v)
  float* lse;                 // (B, H_q, S_q) contiguous, or null
  const float* alibi_slopes;  // one per (batch, query head), or null
  const float* sinks;         // one per query head, or null
  Strides q_strides, k_strides, v_strides, out_strides;
  std::int64_t alibi_batch_stride, alibi_head_stride;
  Lengths lengths;
  Band band;
  ScoreMap score_map;
  Dropout dropout;
  int heads;            // query heads
  int group;            // query heads per KV head
  HeadPacking packing;  // of the rows of a tile, whose `head` counts packs
  int head_dim;         // of Q and K
  int head_dim_v;
  SingleTileScheduler scheduler;

  static ForwardParams of(const ForwardPlan& plan, const ForwardTensors& t) {
    const Problem& p = plan.problem;
    const TensorView& slopes = t.alibi_slopes;
    return {
        .q = t.q.data,
        .k = t.k.data,
        .v = t.v.data,
        .out = t.out.data,
        .lse = t.lse.given() ? static_cast<float*>(t.lse.data) : nullptr,
        .alibi_slopes = slopes.given() ? static_cast<const float*>(slopes.data) : nullptr,
        .sinks = t.sinks.given() ? static_cast<const float*>(t.sinks.data) : nullptr,
        .q_strides = Strides::of(t.q),
        .k_strides = Strides::of(t.k),
        .v_strides = Strides::of(t.v),
        .out_strides = Strides::of(t.out),
        .alibi_batch_stride = slopes.rank == 2 ? slopes.strides[0] : 0,
        .alibi_head_stride = slopes.given() ? slopes.strides[slopes.rank - 1] : 0,
        .lengths = p.lengths(),
        .band = p.band,
        .score_map = ScoreMap::of(p.scale, p.softcap),
        .dropout = p.dropout,
        .heads = p.heads_q,
        .group = p.group(),
        .packing = plan.packing,
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .scheduler = {p.heads_q, plan.m_blocks},
    };
  }
};

/// What a backward kernel is launched with. Its tiles of scores are transposed: keys are rows, queries are columns.
struct BackwardParams {
  const void* q;              // (B, S_q, H_q, D)
  const void* k;              // (B, S_k, H_k, D)
  const void* v;              // (B, S_k, H_k, D_v)
  const void* out;            // (B, S_q, H_q, D_v)
  const void* dout;           // (B, S_q, H_q, D_v)
  const float* lse;           // (B, H_q, S_q) contiguous
  const float* dlse;          // the same, or null
  const float* alibi_slopes;  // one per (batch, query head), or null
  const float* sinks;         // one per query head, or null
  void* dq;                   // like q; null where not wanted, as the others
  void* dk;                   // like k
  void* dv;                   // like v
  float* dsinks;              // like sinks
  Strides q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides;
  std::int64_t alibi_batch_stride, alibi_head_stride;
  Lengths lengths;
  Band band;            // transposed
  HeadPacking packing;  // none
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
  int m_blocks;       // tiles of query rows in one head
  int n_blocks;       // tiles of keys in one head
  int heads_at_once;  // KV heads whose key blocks take turns: see KeyBlock
  BackwardWorkspace workspace;
  void* memory;  // of `workspace`

  FLASHTILE_HOST_DEVICE std::int64_t workspace_tile(int batch, int head, int m_block) const {
    return (std::int64_t(batch) * heads + head) * m_blocks + m_block;
  }
  FLASHTILE_HOST_DEVICE std::int64_t workspace_row(int batch, int head, int query) const {
    return workspace_tile(batch, head, 0) * workspace.tile_m + query;
  }

  static BackwardParams of(const BackwardPlan& plan, const BackwardTensors& t, void* memory) {
    const Problem& p = plan.problem;
    const ForwardTensors& f = t.forward;
    const TensorView& slopes = f.alibi_slopes;
    const auto floats = [](const TensorView& x) { return x.given() ? static_cast<const float*>(x.data) : nullptr; };
    return {
        .q = f.q.data,
        .k = f.k.data,
        .v = f.v.data,
        .out = f.out.data,
        .dout = t.dout.data,
        .lse = floats(f.lse),
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
        .alibi_batch_stride = slopes.rank == 2 ? slopes.strides[0] : 0,
        .alibi_head_stride = slopes.given() ? slopes.strides[slopes.rank - 1] : 0,
        .lengths = p.lengths(),
        .band = p.band.transposed(),
        .packing = {},
        .score_map = ScoreMap::of(p.scale, p.softcap),
        .dropout = p.dropout,
        .scale = p.scale,
        .deterministic = p.deterministic,
        .batch = p.batch,
        .heads = p.heads_q,
        .heads_k = p.heads_k,
        .group = p.group(),
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .m_blocks = (p.seqlen_q + plan.variant.tile_m - 1) / plan.variant.tile_m,
        .n_blocks = (p.seqlen_k + plan.variant.tile_n - 1) / plan.variant.tile_n,
        .heads_at_once = plan.heads_at_once,
        .workspace = BackwardWorkspace::of(p, plan.variant),
        .memory = memory,
    };
  }
};

}  // namespace flashtile
