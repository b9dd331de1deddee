// This file declares what runs after a backward kernel in which several thread blocks shared each block of keys.
#pragma once

#include "flashtile/params.h"

namespace flashtile {

/// Sums what the parts of each block of keys left in the workspace, and writes dk and dv, where those are wanted. With
/// one part it does nothing.
void join_gradients(BackwardPlan const& plan, BackwardParams const& params, Stream stream);

}  // namespace flashtile
