// Before a forward kernel on ragged sequences: which blocks of rows there are, in the order of their work. A backward
// has them listed beside what else comes before it.
#pragma once

#include "flashtile/plan.h"
#include "flashtile/scheduler/ragged.h"

namespace flashtile {

/// Launches the kernel that fills the list of `order`.
void order_tiles(const Sequences& sequences, const RaggedOrder& order, Device device, Stream stream);

}  // namespace flashtile
