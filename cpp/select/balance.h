// This file orders the tiles of the persistent kernel and divides them among its thread blocks.
#pragma once

#include <memory>
#include <span>

#include "flashtile/plan.h"
#include "flashtile/scheduler/persistent.h"

namespace flashtile {

/// Divides the tiles of `scheduler`, whose other fields are set, among its thread blocks. It assigns an even number of
/// rounds, of one tile for each block, and deals the tiles of the last two or three rounds longest first, each to the
/// block with the least work so far. cost[m] is the work of a tile of the m-th block of rows. Returns all work over the
/// number of blocks times the work of the busiest one; of a large problem, whose rounds it does not count, about 1.
double divide(PersistentScheduler& scheduler, std::span<const int> cost);

/// Returns the scheduler for a plan that has all the rest. Of the sections (see sections.h) it takes the smallest that
/// divides the work as well as any, or, where heads are short, a still smaller one that does it nearly as well. It
/// remembers what it found.
std::shared_ptr<const PersistentScheduler> balanced_scheduler(const ForwardPlan& plan, const DeviceInfo& device);

}  // namespace flashtile
