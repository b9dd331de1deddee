// This file declares the kernel that runs after a forward whose tiles' keys are split: it joins their partial results.
#pragma once

#include "flashtile/cache.h"
#include "flashtile/fixed_parts.h"
#include "flashtile/params.h"

namespace flashtile {

/// Launches the kernel that joins the parts of each row in the order of their keys, adds the sinks, which count once
/// for a row, and writes the output, the lse and what a backward needs.
void join_parts(const ForwardPlan& plan, const ForwardParams& params, Stream stream);

/// Does the same for fixed parts of the keys of a cache, of which a tile has those that it sees. `rows` are the
/// cache's, where the batch of queries is dense.
void join_fixed_parts(const ForwardPlan& plan, const ForwardParams& params, const FixedParts& parts,
                      const CachedRows& rows, Stream stream);

}  // namespace flashtile
