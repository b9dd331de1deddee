// This file declares the kernel that runs after a forward whose tiles' keys are split: it joins their partial results.
#pragma once

#include "flashtile/params.h"

namespace flashtile {

/// Launches the kernel that joins the parts of each row in the order of their keys, adds the sinks, which count once
/// for a row, and writes the output, the lse and what a backward needs.
void join_parts(const ForwardPlan& plan, const ForwardParams& params, Stream stream);

}  // namespace flashtile
