// Before a backward kernel: what it needs of each row, lists of ragged tiles, the beginning of dQ, gradients of sinks.
#pragma once

#include "flashtile/params.h"

namespace flashtile {

/// No row of the table has more.
inline constexpr int kMostRowsOfBackwardTile = 128;

/// Fills the workspace of the kernel that comes next, and dsinks if those are wanted.
void prepare_backward(BackwardPlan const& plan, BackwardParams const& params, Stream stream);

}  // namespace flashtile
