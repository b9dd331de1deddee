// This file declares the kernel that runs before a forward over ragged sequences: it lists the blocks of query rows,
// longest first. A backward has its lists made by prepare_backward, beside what else comes before it.
#pragma once

#include "flashtile/plan.h"
#include "flashtile/scheduler/ragged.h"

namespace flashtile {

/// Launches the kernel that fills the list of `order`.
void order_tiles(const Sequences& sequences, const RaggedOrder& order, Device device, Stream stream);

}  // namespace flashtile
