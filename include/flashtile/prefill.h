// Many rows of queries over a cache, on Hopper: the forward kernel goes over it, as over ragged sequences.
#pragma once

#include <numeric>

#include "flashtile/kvcache.h"

namespace flashtile {

/// Where things lie in the workspace, in bytes.
struct PrefillWorkspace {
  std::int64_t begins_q = 0;  // (B + 1), int32: where the sequences begin among all rows of q
  std::int64_t begins_k = 0;  // (B + 1), int32: and among all rows of the cache, as if each had its pages to itself
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

/// Keys that TMA brings at a time: of one page, where the cache has a table of them.
inline int rows_of_box(const KvcacheProblem& cache, const Variant& v) {
  return std::gcd(cache.page_size, v.tile_n);
}

/// Launches a forward kernel on tensors as plan.prefill has them.
using PrefillKernel = void (*)(const KvcachePlan&, const KvcacheTensors&, const ForwardTensors&, void* memory, Stream);

/// Appends, rotates, tells where sequences begin and end, and has `attend` attend.
void prefill(const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream, PrefillKernel attend);

/// The same by plan.prefill's own kernel, of a cache without a table. Null in a build without CUDA.
KvcacheKernel prefill_kernel();

}  // namespace flashtile
