// This file flattens plan and tensors into what the kernel over a cache is launched with.
#pragma once

#include <cstdint>

#include "flashtile/cuda/marked_count.h"
#include "flashtile/kvcache.h"
#include "flashtile/math/score_params.h"
#include "flashtile/math/state.h"
#include "flashtile/params.h"
#include "flashtile/scheduler/split_keys.h"

namespace flashtile {

/// These slots in the workspace hold partial results, over some of a tile's keys, until the thread block that finishes
/// last merges them.
struct Partials {
  float* out = nullptr;       // (slot, KV head, M, D)
  RowState* state = nullptr;  // (slot, KV head, M)
  // (slot, KV head): at the slot of a tile's first partial result, the number of the tile's that are written, see
  // MarkedCount.
  std::uint64_t* arrivals = nullptr;
  std::uint64_t mark = 0;
};

/// Calls are those that a kernel's code serves. Plain ones are most that decode: see SplitKeys::plain(), and besides no
/// softcap or ALiBi maps their scores, and no largest logit is wanted. Of these some have one tile to a sequence. A
/// token over few keys takes as long as a warp takes for its instructions, one after the other, so the code for fewer
/// calls asks for nothing that these do not need: 92 shapes took 0.88 of the time (docs/performance.md).
enum class Calls { kAll, kPlain, kOneTileEach };

struct KvcacheParams {
  const void* q;  // (B, S_q, H_q, D)
  const void* k;  // (page, row, H_k, D)
  const void* v;  // (page, row, H_k, D_v)
  void* out;      // (B, S_q, H_q, D_v)
  float* lse;     // (B, H_q, S_q) contiguous, or null
  LargestScores largest;
  const float* sinks;  // one per query head, or null
  Strides q_strides, k_strides, v_strides, out_strides;
  RowStrides lse_strides;
  Pages pages;
  ScoreParams<GroupPacking> scores;
  Divisor heads_k;
  int head_dim;
  int head_dim_v;
  SplitKeys schedule;
  Partials partials;
  bool passes_by;  // whether L2 evicts keys and values first: see CachePolicy
  // These are of a cache of 8-bit numbers, where q and out are float16 or bfloat16.
  CacheDescales k_descales, v_descales;
  bool is_bf16;

  static KvcacheParams of(const KvcachePlan& plan, const KvcacheTensors& t, void* memory, std::uint64_t mark) {
    const Problem& p = plan.problem;
    const KvcacheProblem& cache = plan.cache;
    const GroupPacking packing{Divisor(p.group())};
    KvcacheParams params = {
        .q = t.q.data,
        .k = t.k_cache.data,
        .v = t.v_cache.data,
        .out = t.out.data,
        .lse = t.lse.given() ? static_cast<float*>(t.lse.data) : nullptr,
        .largest = LargestScores::of(t.max_logits),
        .sinks = t.sinks.given() ? static_cast<const float*>(t.sinks.data) : nullptr,
        .q_strides = Strides::of(t.q),
        .k_strides = Strides::of(t.k_cache),
        .v_strides = Strides::of(t.v_cache),
        .out_strides = Strides::of(t.out),
        .lse_strides = RowStrides::of(p),
        .pages = cache.layout(t),
        .scores = {p.score_map(), p.mask(), packing, AlibiSlopes::of(t.alibi_slopes)},
        .heads_k = Divisor(p.heads_k),
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .schedule = {.queries = cache.queries(t),
                     .rows = cache.rows(t),
                     .mask = p.mask(),
                     .masked = cache.masked(t),
                     .packing = packing,
                     .teams = Divisor(plan.teams),
                     .keys_of_split = plan.keys_of_split,
                     .num_splits = plan.num_splits,
                     .apart = plan.splits_apart,
                     .most_queries = plan.most_queries},
        .partials = {},
        .passes_by = plan.passes_by,
        .k_descales = CacheDescales::of(t.k_descale),
        .v_descales = CacheDescales::of(t.v_descale),
        .is_bf16 = p.dtype == DType::kBFloat16,
    };
    if (cache.rotary_dim > 0) {
      params.q = static_cast<const char*>(memory) + plan.rotated_at;
      const std::int64_t row = std::int64_t{p.heads_q} * p.head_dim;
      params.q_strides = {p.ragged ? 0 : p.seqlen_q * row, row, p.head_dim};
    }
    const std::int64_t places = std::int64_t{plan.partials} * p.heads_k;
    const std::int64_t rows = places * plan.variant.tile_m;
    params.partials.out = static_cast<float*>(memory);  // `out` comes first: float4 accesses need its 16-byte alignment
    params.partials.state = reinterpret_cast<RowState*>(params.partials.out + rows * plan.variant.head_dim);
    params.partials.arrivals = reinterpret_cast<std::uint64_t*>(params.partials.state + rows);
    params.partials.mark = mark;
    return params;
  }

  /// Returns for which calls there is code that serves this one, with tiles of `tile_m` rows.
  Calls calls(int tile_m) const {
    if (!schedule.plain() || scores.map.maps() || largest.wanted()) return Calls::kAll;
    return schedule.has_one_tile_each(tile_m) ? Calls::kOneTileEach : Calls::kPlain;
  }
};

}  // namespace flashtile
