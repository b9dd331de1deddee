// Many rows of queries over a cache, on Hopper: the forward kernel goes over it, as over ragged sequences.
#pragma once

#include "flashtile/kvcache.h"

namespace flashtile {

/// Where things lie in the workspace, in bytes.
struct PrefillWorkspace {
  std::int64_t begins_q = 0;  // (B + 1), int32: where the sequences begin among all rows of q
  std::int64_t begins_k = 0;  // (B + 1), int32: and among all rows of the cache
  std::int64_t used_k = 0;    // (B), int32: rows of the cache that count
  std::int64_t lse = 0;       // (H_q, B · S_q), float32: as the kernel leaves it
  std::int64_t forward = 0;   // the kernel's own
  std::int64_t bytes = 0;

  /// Behind `before` bytes of others.
  static PrefillWorkspace of(std::int64_t before, const Problem& problem, const ForwardPlan& forward) {
    PrefillWorkspace workspace;
    const auto take = [&](std::int64_t& place, std::int64_t bytes) {
      place = before;
      before = (before + bytes + 63) / 64 * 64;
    };
    const std::int64_t tables = 4 * (std::int64_t{problem.batch} + 1);
    before = (before + 63) / 64 * 64;
    take(workspace.begins_q, tables);
    take(workspace.begins_k, tables);
    take(workspace.used_k, tables);
    take(workspace.lse, problem.ragged ? 0 : std::int64_t{4} * problem.batch * problem.seqlen_q * problem.heads_q);
    take(workspace.forward, forward.workspace_bytes);
    workspace.bytes = before;
    return workspace;
  }
};

/// Appends, rotates, and has plan.prefill attend. Null in a build without CUDA.
KvcacheKernel prefill_kernel();

}  // namespace flashtile
