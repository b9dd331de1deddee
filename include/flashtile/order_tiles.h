// Before a kernel on ragged sequences: which blocks of rows there are, in the order of their work.
#pragma once

#include <array>

#include "flashtile/plan.h"
#include "flashtile/scheduler/ragged.h"

namespace flashtile {

/// Launches the kernel that fills the lists of `orders`; those without a list are left out.
void order_tiles(const Sequences& sequences, const std::array<RaggedOrder, 2>& orders, Device device, Stream stream);

}  // namespace flashtile
