// This file declares what runs before a backward kernel: it computes what that needs of each row, lists ragged tiles,
// initialises dQ, and forms the gradients of sinks.
#pragma once

#include "flashtile/params.h"

namespace flashtile {

/// Fills the workspace of the kernel that comes next, and dsinks if that is wanted.
void prepare_backward(BackwardPlan const& plan, BackwardParams const& params, Stream stream);

}  // namespace flashtile
