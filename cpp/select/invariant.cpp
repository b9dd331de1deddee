// This file makes the plans of batch-invariant calls on Hopper: of a forward, and of one over a cache. Which kernels
// serve a call depends on nothing that a batch, a chunk or a cache changes, and all that serve it give the same bits.
#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "flashtile/fixed_parts.h"
#include "flashtile/flashtile.h"
#include "flashtile/prefill.h"
#include "select/choose.h"
#include "select/plans.h"
#include "select/work.h"

namespace flashtile {
namespace {

constexpr const char* kInvariant = "batch-invariant, on Hopper: the forward kernel with fixed parts of the keys";
constexpr const char* kOfCopy =
    "batch-invariant, on Hopper: copied, then the forward kernel with fixed parts of the keys";

bool is_on_hopper(const Problem& p, const DeviceInfo& device) {
  return p.device.type == DeviceType::kCuda && device.compute_capability == 90;
}

/// Returns the narrowest row that is wide enough, among those for few queries or among the others. Of several it takes
/// the one with the least estimated time.
template <class EstimateOf>
const InvariantRow& row_for(const Problem& p, bool few_queries, const EstimateOf& estimate_of) {
  const InvariantRow* best = nullptr;
  for (const InvariantRow& row : invariant_rows()) {
    const Variant& v = row.variant;
    if (!serves(row, p) || has_few_queries(v) != few_queries) continue;
    if (best && (v.head_dim != best->variant.head_dim || v.head_dim_v != best->variant.head_dim_v)) break;
    if (!best || estimate_of(row).time < estimate_of(*best).time) best = &row;
  }
  return *best;
}

ForwardPlan planned(const Problem& p, const Variant& v, const Estimate& estimate, int keys_of_sequence,
                    const DeviceInfo& device) {
  ForwardPlan plan = plan_tiles(p, v, estimate, device);
  plan.shared_memory = FixedPartsMemory::of(v).bytes;
  if (plan.splits == 1) plan.parts_at = (plan.workspace_bytes + 15) / 16 * 16;
  plan.workspace_bytes = plan.parts_at + FixedParts::bytes(plan, keys_of_sequence);
  return plan;
}

/// Returns the row for such a call.
const InvariantRow& row_over_cache(const Problem& p, const DeviceInfo& device) {
  const auto estimate_of = [&](const InvariantRow& row) { return estimate_fixed_parts(row.variant, p, device); };
  const InvariantRow& few = row_for(p, true, estimate_of);
  if (rows_of_sequence(p) <= few.variant.tile_m) return few;
  const InvariantRow& tall = row_for(p, false, estimate_of);
  return estimate_of(few).time < estimate_of(tall).time ? few : tall;
}

/// Plans the call over a cache as it lies.
bool select_as_it_lies(KvcachePlan& plan, const DeviceInfo& device) {
  const KvcacheProblem& cache = plan.cache;
  const Problem &p = cache.problem, estimated = as_dense(cache);
  const InvariantRow& row = row_over_cache(estimated, device);
  const Estimate estimate = estimate_fixed_parts(row.variant, estimated, device);
  // Tiles of a dense batch are dealt out ahead, as if all sequences filled the cache. Where no tile waits for another,
  // that is no matter; else they are taken one by one, by the lengths that the GPU finds.
  // Where q has gaps, its rows are no ragged sequences.
  const auto plan_of = [&](const Problem& as) { return planned(as, row.variant, estimate, p.seqlen_k, device); };
  std::optional<ForwardPlan> dense;
  if (!p.ragged) dense = plan_of(p);
  const bool as_batch = dense && (!cache.q_in_line || dense->tiles <= device.multiprocessors);
  complete(plan, as_batch ? *std::move(dense) : plan_of(as_ragged(cache)), row.run_over_cache, kInvariant);
  return true;
}

}  // namespace

bool has_invariant_kernel(const Problem& p, const DeviceInfo& device) {
  const auto serves_it = [&](const InvariantRow& row) { return serves(row, p); };
  return is_on_hopper(p, device) && std::ranges::any_of(invariant_rows(), serves_it);
}

ForwardPlan select_invariant(const Problem& p, const DeviceInfo& device) {
  const Problem dense = p.dense();
  // Of several ragged sequences the host does not know the longest, by whose parts tiles would be shared out.
  const bool may_share = !p.ragged || p.batch == 1;
  const auto estimate_of = [&](const InvariantRow& row) {
    return may_share ? estimate_fixed_parts(row.variant, dense, device) : estimate_forward(row.variant, dense, device);
  };
  const InvariantRow* row = &row_for(dense, false, estimate_of);
  Estimate estimate = estimate_of(*row);
  if (may_share) {
    const InvariantRow& few = row_for(dense, true, estimate_of);
    const Estimate shared = estimate_of(few);
    if (shared.splits > 1 && shared.time < estimate.time) row = &few, estimate = shared;
  }
  ForwardPlan plan = planned(p, row->variant, estimate, p.seqlen_k, device);
  plan.why = kInvariant;
  plan.run = row->run;
  return plan;
}

bool select_invariant(KvcachePlan& plan, const DeviceInfo& device) {
  const KvcacheProblem& cache = plan.cache;
  const Problem& p = plan.problem;
  if (is_fp8(cache.stored()) || !has_invariant_kernel(p, device)) return false;
  const std::int64_t keys = std::int64_t{p.batch} * p.seqlen_k;
  if (keys == 0 || cache.queries() == 0) return false;  // no row sees a key
  countable("q", cache.queries(), "rows");
  countable("k_cache", std::max(keys, std::int64_t{cache.pages} * cache.page_size), "rows");
  const Variant& v = row_over_cache(as_dense(cache), device).variant;
  if (cache.in_line && !pays_to_copy(cache, v)) return select_as_it_lies(plan, device);
  // Any other kernel would give other bits, so a copy is made, however large.
  return select_over_copy(plan, device, select_as_it_lies, kOfCopy, std::numeric_limits<std::int64_t>::max());
}

}  // namespace flashtile
