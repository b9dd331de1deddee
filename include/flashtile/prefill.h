// This file declares attention of many query rows over a cache on Hopper: the forward kernel goes over the cache as
// over ragged sequences, or, with so few tiles in pages that none waits for another, as over a dense batch.
#pragma once

#include <numeric>

#include "flashtile/kvcache.h"

namespace flashtile {

/// These are offsets into the workspace, in bytes. A dense forward needs no tables, and writes the lse as callers have
/// it.
struct PrefillWorkspace {
  std::int64_t begins_q = 0;  // (B + 1), int32: where the sequences begin among all rows of q
  std::int64_t begins_k = 0;  // (B + 1), int32: and among all keys, where each sequence counts with its whole capacity
  std::int64_t used_k = 0;    // (B), int32: rows of the cache that count
  std::int64_t used_q = 0;    // (B), int32: queries that count, in a mixed batch
  std::int64_t lse = 0;       // (H_q, B · S_q), float32: as the forward kernel writes it
  std::int64_t forward = 0;   // the forward kernel's own workspace
  std::int64_t bytes = 0;

  /// Returns the offsets of a workspace that follows `before` bytes of other data.
  static PrefillWorkspace of(std::int64_t before, const Problem& problem, const ForwardPlan& forward) {
    PrefillWorkspace workspace;
    const auto take = [&](std::int64_t& place, std::int64_t bytes) {
      place = before;
      before = (before + bytes + 63) / 64 * 64;
    };
    const std::int64_t tables = forward.problem.ragged ? 4 * (std::int64_t{problem.batch} + 1) : 0;
    const bool has_lse = forward.problem.ragged && !problem.ragged;
    before = (before + 63) / 64 * 64;
    take(workspace.begins_q, tables);
    take(workspace.begins_k, tables);
    take(workspace.used_k, tables);
    take(workspace.used_q, tables);
    take(workspace.lse, has_lse ? std::int64_t{4} * problem.batch * problem.seqlen_q * problem.heads_q : 0);
    take(workspace.forward, forward.workspace_bytes);
    workspace.bytes = before;
    return workspace;
  }
};

/// These are offsets into the workspace, in bytes, where rows of 8-bit numbers are widened to q's dtype before the
/// forward kernel goes over them: as a contiguous cache, with all rows that sequences have room for.
struct WidenedRows {
  std::int64_t k = 0;     // (B, rows of a sequence, H_k, D)
  std::int64_t v = 0;     // (B, rows of a sequence, H_k, D_v)
  std::int64_t held = 0;  // (B), int32: rows that count
  std::int64_t rest = 0;  // what follows: the workspace of the call over them

  /// Returns the offsets of rows that follow `before` bytes of other data.
  static WidenedRows of(std::int64_t before, const Problem& p) {
    WidenedRows rows;
    const auto take = [&](std::int64_t& place, std::int64_t bytes) {
      place = (before + 127) / 128 * 128;
      before = place + bytes;
    };
    const std::int64_t of_width = std::int64_t{p.batch} * p.seqlen_k * p.heads_k * bytes_of(p.dtype);
    take(rows.k, of_width * p.head_dim);
    take(rows.v, of_width * p.head_dim_v);
    take(rows.held, std::int64_t{4} * p.batch);
    take(rows.rest, 0);
    return rows;
  }
};

/// Returns how many keys TMA loads at a time: those of a box lie in one page, unless that is the sequence's only one.
/// Each lane of a warp loads one box of a tile. Where left padding lets a tile begin anywhere in a page, and where
/// boxes would have so few rows that it is faster, rows are gathered (see RowsSm90), and it returns 0. Rows of 8 bits
/// are not gathered.
inline int rows_of_box(const KvcacheProblem& cache, const Variant& v) {
  constexpr int kLanes = 32;
  const int fewest = is_fp8(cache.stored()) ? 4 : 8;
  const int rows = cache.of_sequence == 1 ? v.tile_n : std::gcd(cache.page_size, v.tile_n);
  return !cache.has_leftpad && rows % fewest == 0 && v.tile_n <= rows * kLanes ? rows : 0;
}

/// Returns whether a plan goes over the rows of a cache without a table, which the forward kernel loads faster than
/// pages, under a column mask of the last keys: so do many tiles. That kernel neither splits keys nor maps scores.
inline bool has_rows(const KvcachePlan& plan) {
  const ForwardPlan& forward = *plan.prefill;
  const bool maps = plan.problem.score_map().maps();
  return plan.problem.column_masked() && !plan.cache.has_table && !plan.cache.has_gaps && !plan.cache.has_leftpad &&
         forward.problem.ragged && forward.splits == 1 && !maps;
}

/// Returns the operands of ragged sequences whose keys are rows of a cache. They end with the last sequence's: entries
/// of the cache beyond B belong to no sequence.
inline ForwardTensors keys_in_rows(const KvcachePlan& plan, ForwardTensors tensors) {
  for (TensorView* view : {&tensors.k, &tensors.v}) view->shape[1] = plan.prefill->problem.seqlen_k;
  return tensors;
}

/// Returns the variant by which queries of a dtype meet keys and values of 8 bits, the dtype of the row `v`: these are
/// widened to that of the queries.
constexpr Variant as_of_queries(Variant v, DType dtype) {
  v.dtype = dtype;
  return v;
}

/// Launches a forward kernel on tensors that fit plan.prefill.
using PrefillKernel = void (*)(const KvcachePlan&, const KvcacheTensors&, const ForwardTensors&, void* memory, Stream);

/// Appends and rotates, writes where ragged sequences begin and end, and launches the forward kernel by `attend`.
void prefill(const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream, PrefillKernel attend);

/// Returns the launcher that does the same by plan.prefill's own kernel, for a cache without a table. It is null in a
/// build without CUDA.
KvcacheKernel prefill_kernel();

/// Returns the launcher for 8-bit numbers: it appends and rotates, widens all rows, and runs plan.widened over them. It
/// is null in a build without CUDA.
KvcacheKernel widened_kernel();

}  // namespace flashtile
