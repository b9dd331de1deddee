// This file orders the tiles of the persistent kernel and divides them among its thread blocks.
#pragma once

#include <memory>
#include <span>

#include "flashtile/plan.h"
#include "flashtile/scheduler/persistent.h"

namespace flashtile {

/// Divides the tiles of `scheduler`, whose other fields are set, among its blocks. It gives as many rounds as can be
/// even, and then deals the tiles that are left, longest first, each to the block with the least work so far. cost[m]
/// is the work of a tile of the m-th block of rows. Returns all work over the time of the busiest block; of a large
/// problem, whose rounds it does not count, about 1.
double divide(PersistentScheduler& scheduler, std::span<const int> cost);

/// Returns the scheduler for a plan that has all the rest. Of the sections that are large enough for neighbours to
/// share keys and values it takes the smallest that divides the work as well as any. It remembers what it found.
std::shared_ptr<const PersistentScheduler> balanced_scheduler(const ForwardPlan& plan);

}  // namespace flashtile
