// This file holds what the files that make plans need of each other.
#pragma once

#include <cstdint>

#include "flashtile/kvcache.h"
#include "select/estimate.h"

namespace flashtile {

/// Makes all of a forward's plan but its kernel and the reason for it.
ForwardPlan plan_tiles(const Problem& problem, const Variant& v, const Estimate& estimate, const DeviceInfo& device);

/// Has Hopper's forward kernel go over a cache if there are enough rows of queries: then it completes the plan, and
/// returns true.
bool select_prefill(KvcachePlan& plan, const DeviceInfo& device);

/// Returns how many bytes of the workspace rotated queries take.
std::int64_t rotated_bytes(const KvcacheProblem& cache);

}  // namespace flashtile
