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

/// Returns whether a kernel ahead is to copy a cache of 16 bits for the row `v` of a table, although that could go over
/// it as it lies.
bool pays_to_copy(const KvcacheProblem& cache, const Variant& v);

/// Plans a batch-invariant call over a cache on Hopper, and returns true, if a row of the table serves it.
bool select_invariant(KvcachePlan& plan, const DeviceInfo& device);
ForwardPlan select_invariant(const Problem& problem, const DeviceInfo& device);

/// Returns the problem of a call over a cache as that of a dense batch of as many queries, by which estimates go. Its
/// seqlen_k is that of a sequence, whether or not queries are ragged, which Problem::dense() does not know.
Problem as_dense(const KvcacheProblem& cache);

/// Returns the problem of a call over a cache as that of a ragged batch, whose keys are all rows of the cache that
/// sequences may have.
Problem as_ragged(const KvcacheProblem& cache);

/// Completes the plan of a call over a cache by that of the forward kernel, which `run` launches.
void complete(KvcachePlan& plan, ForwardPlan forward, KvcacheKernel run, const char* why);

/// Plans the call over a copy of the cache by `select`: rows of q's dtype, contiguous, with no left padding. It looks
/// at them as at a contiguous cache that nothing is added to. Returns false, with nothing done, if `select` does, or if
/// there would be more bytes than `most`.
bool select_over_copy(KvcachePlan& plan, const DeviceInfo& device, bool (*select)(KvcachePlan&, const DeviceInfo&),
                      const char* why, std::int64_t most);

/// Plans the kernel over a cache for those sequences of a mixed batch that have up to so many queries.
KvcachePlan select_few(const KvcacheProblem& cache, int most_queries, const DeviceInfo& device);

/// Returns how many bytes of the workspace rotated queries take.
std::int64_t rotated_bytes(const KvcacheProblem& cache);

}  // namespace flashtile
