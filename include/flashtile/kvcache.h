// This file declares attention over a cache of keys and values, as serving asks for it: what is asked, and what was
// decided.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "flashtile/cache.h"
#include "flashtile/mask/columns.h"
#include "flashtile/plan.h"
#include "flashtile/problem.h"

namespace flashtile {

struct KvcacheOptions {
  Options attention;               // its dropout is not used
  bool rotary_interleaved = true;  // rotated pairs are neighbours; else element i is paired with element i + R / 2
  std::int64_t num_splits = 0;     // splits of a sequence's keys; 0: as many as fill the GPU
  bool batch_invariant = false;    // a row's result depends on its own sequence alone, bit for bit

  /// Does what Options::each does.
  template <class Visit>
  constexpr void each(Visit&& visit) {
    attention.each_of_scores(visit);
    visit("rotary_interleaved", rotary_interleaved);
    visit("num_splits", num_splits);
    visit("batch_invariant", batch_invariant);
  }
};

/// These are the tensors of a call. All of the second part, lse and max_logits are optional.
struct KvcacheTensors {
  TensorView q;              // (B, S_q, H_q, D), or of a ragged batch (T_q, H_q, D)
  TensorView k_cache;        // (B_cache, S_cache, H_k, D), or with a block table (pages, page_size, H_k, D)
  TensorView v_cache;        // (B_cache, S_cache, H_k, D_v), or (pages, page_size, H_k, D_v)
  TensorView cache_seqlens;  // (B), int32, contiguous: rows that the cache holds of each sequence before k_new is added
  TensorView out;            // (B, S_q, H_q, D_v), or (T_q, H_q, D_v)
  TensorView lse;            // (B, H_q, S_q), or (H_q, T_q), float32, contiguous
  TensorView max_logits;     // (B, H_q), float32, contiguous: the largest score of each head

  TensorView k_new;            // (B, S_new, H_k, D), or ragged (T_q, H_k, D): rows that are written to the cache first
  TensorView v_new;            // (B, S_new, H_k, D_v), or (T_q, H_k, D_v)
  TensorView rotary_cos;       // (positions, R / 2), of q's dtype
  TensorView rotary_sin;       // (positions, R / 2)
  TensorView block_table;      // (B, pages of a sequence), int32
  TensorView cache_batch_idx;  // (B), int32, contiguous: the entry of a contiguous cache that each sequence uses
  TensorView leftpad;          // (B), int32, contiguous: rows at a sequence's beginning that do not count
  TensorView cu_seqlens_q;     // (B + 1), int32, contiguous; where given, q and k_new are ragged
  TensorView alibi_slopes;     // (H_q) or (B, H_q), float32
  TensorView sinks;            // (H_q), float32
  TensorView mask;  // (B or 1, H, N, 4), int32, see HiddenRows: the last N keys of each sequence; H: 1, H_k, H_q
  // These are of caches of 8-bit numbers, float32: (), (1), (B, H_k), or the shape of a cache without its last
  // dimension. New rows get descales of their own, if there is one for each row.
  TensorView k_descale, v_descale;

  /// Returns the same tensors, with a batch dimension of one entry where q is ragged.
  KvcacheTensors with_batch() const;
};

/// `problem` holds what every attention has; its seqlen_q is T_q where q is ragged, its seqlen_k the capacity of a
/// sequence.
struct KvcacheProblem {
  Problem problem;
  int pages = 0;        // pages of the cache; of a contiguous cache, its entries
  int page_size = 0;    // rows of a page; of a contiguous cache, S_cache
  int of_sequence = 1;  // pages of a sequence
  bool appends = false;
  int seqlen_new = 0;   // S_new; of a ragged q, T_q
  int rotary_dim = 0;   // R, the elements of a row that are rotated; 0: none
  int rotary_rows = 0;  // positions in the rotary tables
  bool rotary_interleaved = true;
  int num_splits = 0;
  bool batch_invariant = false;
  int masked_keys = 0;           // N, the columns of the column mask: the last keys of each sequence, if it has so many
  bool q_in_line = false;        // q's rows have one stride across entries, and so do out's
  bool in_line = false;          // the cache's entries are whole rows apart
  bool has_gaps = false;         // but these have gaps between them: heads come before rows, or keys beside values
  bool has_table = false;        // a block_table or a cache_batch_idx is given
  DType narrow = DType::kOther;  // the dtype of keys and values, if they are of 8 bits
  bool descales_of_rows = false;  // whether each of their rows has a descale of its own
  bool has_leftpad = false;       // rows at the beginning of sequences may not count

  Spans queries(const KvcacheTensors& tensors) const;
  CachedRows rows(const KvcacheTensors& tensors) const;
  Pages layout(const KvcacheTensors& tensors) const;
  LastColumns masked(const KvcacheTensors& tensors) const;

  /// Returns the dtype of keys and values.
  DType stored() const { return is_fp8(narrow) ? narrow : problem.dtype; }
  /// Returns how many rows q has over all sequences.
  std::int64_t queries() const {
    return problem.ragged ? problem.seqlen_q : std::int64_t{problem.batch} * problem.seqlen_q;
  }
};

/// Returns how many rows of a (B, S, H, D) tensor an entry is from the next: more than S where they have gaps between
/// them. Returns 0 where that is no whole number, or too many for an int to count them all.
int rows_to_next(const TensorView& tensor);

struct KvcachePlan;
using KvcacheKernel = void (*)(const KvcachePlan&, const KvcacheTensors&, void* workspace, Stream);

struct KvcachePlan : Plan {
  KvcacheProblem cache;
  int teams = 1;  // thread blocks that share the work of each KV head: see SplitKeys, also for the next three
  int keys_of_split = 0;
  int num_splits = 0;
  bool splits_apart = false;
  int partials = 0;             // slots for partial results of a KV head
  bool passes_by = false;       // whether L2 evicts keys and values first: see CachePolicy
  std::int64_t rotated_at = 0;  // offset of the rotated q in the workspace, in bytes
  std::int64_t prefill_at = 0;  // and of what prefill uses: see PrefillWorkspace
  // With many query rows on Hopper, this is the plan of the forward kernel that attends; else null.
  std::shared_ptr<const ForwardPlan> prefill;
  // With as many over 8-bit numbers, or small pages, this is the plan of the call over a contiguous cache of q's dtype,
  // into which a kernel ahead writes; else null. That cache lies in the workspace at an offset of so many bytes.
  std::shared_ptr<const KvcachePlan> widened;
  std::int64_t widened_at = 0;
  // In a mixed batch, whose sequences have many or few queries as only the GPU knows, `prefill` attends for those of
  // many, and afterwards this plan for the others, whose `most_queries` says how many those have at the most; else it
  // is null. Both have the same workspace.
  std::shared_ptr<const KvcachePlan> few;
  int most_queries = Band::kUnbounded;
  KvcacheKernel run = nullptr;

  /// Returns whether it is such a plan for sequences of few queries. Another one has appended and rotated before.
  bool comes_second() const { return most_queries < Band::kUnbounded; }
};

/// The warps of a CUDA kernel over a cache form groups: those of a group share a tile of keys, and a thread block has
/// groups_of(v) groups, each with its own keys.
constexpr int warps_of_group(const Variant& v) {
  return std::clamp(v.tile_m / 16, 1, v.warps);
}
constexpr int groups_of(const Variant& v) {
  return v.warps / warps_of_group(v);
}

/// Returns the bytes of shared memory: each group has a tile of Q and a ring of K and V tiles, and with 8-bit numbers a
/// factor for each row of these; afterwards its result over its own keys takes the same memory.
constexpr int kvcache_shared_memory(const Variant& v) {
  const int factors = v.fp8() ? (4 * (v.tile_m + v.stages * v.tile_n) + 127) / 128 * 128 : 0;
  const int rings = groups_of(v) * (factors + v.head_dim * (2 * v.tile_m + bytes_of(v.dtype) * v.stages * v.tile_n));
  const int found = groups_of(v) * v.tile_m * (4 * (v.head_dim + 8) + 8);
  return (std::max(rings, found) + 127) / 128 * 128;
}

/// Returns how many thread blocks a multiprocessor is to hold, whose registers they share: two of few queries, since
/// their warps have more to do than to wait for memory.
constexpr int blocks_of_multiprocessor(const Variant& v) {
  return v.tile_m == 8 ? 2 : 1;
}

/// Returns the bytes of one slot for a partial result of a KV head: see Partials.
constexpr std::int64_t kvcache_place_bytes(const Variant& v) {
  return 8 + std::int64_t{v.tile_m} * (8 + 4 * v.head_dim);
}

/// Checks that the call is legal and returns what is asked; messages begin with `function`.
KvcacheProblem check_kvcache(const char* function, const KvcacheTensors& tensors, const KvcacheOptions& options);
KvcachePlan select_kvcache(const KvcacheProblem& problem, const DeviceInfo& device);
KvcachePlan plan_kvcache(const char* function, const KvcacheTensors& tensors, const KvcacheOptions& options,
                         const DeviceInfo& device);

/// Returns the cost of a call on full caches, as the host does not know how much they hold.
Cost kvcache_cost(const KvcacheProblem& problem);

std::string to_string(const KvcachePlan& plan);

/// Appends new rows, rotates and attends. It is asynchronous on CUDA, never allocates device memory and never
/// synchronises.
void run_kvcache(const KvcachePlan& plan, const KvcacheTensors& tensors, void* workspace, Stream stream);

}  // namespace flashtile
