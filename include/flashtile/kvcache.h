// Attention over a cache of keys and values, as serving asks for it: what is asked, and what was decided.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "flashtile/cache.h"
#include "flashtile/plan.h"
#include "flashtile/problem.h"

namespace flashtile {

struct KvcacheOptions {
  Options attention;               // without dropout
  bool rotary_interleaved = true;  // pairs are neighbours; else the halves of what is rotated
  std::int64_t num_splits = 0;     // parts that the keys of a sequence are divided into; 0: as many as fill the GPU
  bool batch_invariant = false;    // a row's result depends on its own sequence alone, to the bit

  /// As Options::each.
  template <class Visit>
  constexpr void each(Visit&& visit) {
    attention.each_of_scores(visit);
    visit("rotary_interleaved", rotary_interleaved);
    visit("num_splits", num_splits);
    visit("batch_invariant", batch_invariant);
  }
};

/// Tensors of a call. All of the second part, and lse, are optional.
struct KvcacheTensors {
  TensorView q;              // (B, S_q, H_q, D), or ragged (T_q, H_q, D)
  TensorView k_cache;        // (B_cache, S_cache, H_k, D), or with a block table (pages, page_size, H_k, D)
  TensorView v_cache;        // (B_cache, S_cache, H_k, D_v), or (pages, page_size, H_k, D_v)
  TensorView cache_seqlens;  // (B), int32, contiguous: rows that the cache holds of each sequence, without k_new
  TensorView out;            // (B, S_q, H_q, D_v), or (T_q, H_q, D_v)
  TensorView lse;            // (B, H_q, S_q), or (H_q, T_q), float32, contiguous

  TensorView k_new;            // (B, S_new, H_k, D), or ragged (T_q, H_k, D): rows for the cache, written there first
  TensorView v_new;            // (B, S_new, H_k, D_v), or (T_q, H_k, D_v)
  TensorView rotary_cos;       // (positions, R / 2), of q's dtype
  TensorView rotary_sin;       // (positions, R / 2)
  TensorView block_table;      // (B, pages of a sequence), int32
  TensorView cache_batch_idx;  // (B), int32, contiguous: the entry of a contiguous cache that each sequence has
  TensorView leftpad;          // (B), int32, contiguous: rows at a sequence's beginning that do not count
  TensorView cu_seqlens_q;     // (B + 1), int32, contiguous: q, and k_new, are ragged
  TensorView alibi_slopes;     // (H_q) or (B, H_q), float32
  TensorView sinks;            // (H_q), float32

  /// The same with an only batch entry where q is ragged.
  KvcacheTensors with_batch() const;
};

/// `problem` holds what any attention has: seqlen_q is T_q where q is ragged, seqlen_k the capacity of a sequence.
struct KvcacheProblem {
  Problem problem;
  int pages = 0;        // of a contiguous cache, entries
  int page_size = 0;    // of a contiguous cache, S_cache
  int of_sequence = 1;  // pages of a sequence
  bool appends = false;
  int seqlen_new = 0;   // S_new; of a ragged q, T_q
  int rotary_dim = 0;   // R; 0: nothing is rotated
  int rotary_rows = 0;  // positions that the tables have
  bool rotary_interleaved = true;
  int num_splits = 0;
  bool batch_invariant = false;
  bool in_line = false;    // all rows of the cache have one stride, those of q too, and none is left out
  bool has_table = false;  // of the pages or the entry that a sequence has

  Spans queries(const KvcacheTensors& tensors) const;
  CachedRows rows(const KvcacheTensors& tensors) const;
  Pages layout(const KvcacheTensors& tensors) const;

  /// Rows of q, of all sequences.
  std::int64_t queries() const {
    return problem.ragged ? problem.seqlen_q : std::int64_t{problem.batch} * problem.seqlen_q;
  }
};

struct KvcachePlan;
using KvcacheKernel = void (*)(const KvcachePlan&, const KvcacheTensors&, void* workspace, Stream);

struct KvcachePlan : Plan {
  KvcacheProblem cache;
  int teams = 1;  // thread blocks that share the work of each KV head: see SplitKeys, also for the next three
  int keys_of_split = 0;
  int num_splits = 0;
  bool splits_apart = false;
  int partials = 0;                            // places for partial results of a KV head
  bool passes_by = false;                      // how the L2 cache keeps keys and values: see CachePolicy
  std::int64_t rotated_at = 0;                 // bytes of the workspace before the rotated q
  std::int64_t prefill_at = 0;                 // and before what is prefill's: see PrefillWorkspace
  std::shared_ptr<const ForwardPlan> prefill;  // of many rows on Hopper: the kernel that attends
  KvcacheKernel run = nullptr;
};

/// Of a CUDA kernel: the warps that share a tile of keys, and how many such groups a thread block has.
constexpr int warps_of_group(const Variant& v) {
  return std::min(v.tile_m / 16, v.warps);
}
constexpr int groups_of(const Variant& v) {
  return v.warps / warps_of_group(v);
}

/// Bytes of shared memory: for each group a tile of Q and a ring of K and V tiles; later, in the same place, what the
/// groups have found.
constexpr int kvcache_shared_memory(const Variant& v) {
  const int rings = bytes_of(v.dtype) * groups_of(v) * v.head_dim * (v.tile_m + v.stages * v.tile_n);
  const int found = groups_of(v) * v.tile_m * (4 * (v.head_dim + 8) + 8);
  return (std::max(rings, found) + 127) / 128 * 128;
}

/// Bytes of one place for a partial result of a KV head: see Partials.
constexpr std::int64_t kvcache_place_bytes(const Variant& v) {
  return 8 + std::int64_t{v.tile_m} * (8 + 4 * v.head_dim);
}

/// Whether the call is legal, and what is asked; messages begin with `function`.
KvcacheProblem check_kvcache(const char* function, const KvcacheTensors& tensors, const KvcacheOptions& options);
KvcachePlan select_kvcache(const KvcacheProblem& problem, const DeviceInfo& device);
KvcachePlan plan_kvcache(const char* function, const KvcacheTensors& tensors, const KvcacheOptions& options,
                         const DeviceInfo& device);

/// If every cache is full: the host does not know what they hold.
Cost kvcache_cost(const KvcacheProblem& problem);

std::string to_string(const KvcachePlan& plan);

/// Appends, rotates and attends. Asynchronous on CUDA; never allocates device memory, never synchronises.
void run_kvcache(const KvcachePlan& plan, const KvcacheTensors& tensors, void* workspace, Stream stream);

}  // namespace flashtile
