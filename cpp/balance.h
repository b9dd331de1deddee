// How the persistent kernel orders its tiles and divides them among its thread blocks.
#pragma once

#include <memory>
#include <span>

#include "flashtile/plan.h"
#include "flashtile/scheduler/persistent.h"

namespace flashtile {

/// Divides the tiles of `scheduler`, whose other fields are set, among its blocks: as many rounds as can be even, and
/// then the longest of the tiles that are left to the block with the least work, and so on. cost[m] is the work of a
/// tile of the m-th block of rows. Returns all work over the time of the busiest block, where it was counted: 1 for a
/// large problem.
double divide(PersistentScheduler& scheduler, std::span<const int> cost);

/// The scheduler for a plan that has all the rest. Of the sections that are large enough for neighbours to share keys
/// and values it takes the smallest that divides the work as well as any. Remembers what it found.
std::shared_ptr<const PersistentScheduler> balanced_scheduler(const ForwardPlan& plan);

/// As a RaggedOrder takes them: list_tiles adds numbers of heads to them.
int few_enough(double blocks_of_section);

/// Of ragged sequences (see RaggedOrder): as many heads stand side by side as have their keys and values in the L2
/// cache together. Head comes after head under a full mask, where all tiles of a sequence have equal work, and where a
/// thread block takes many: the parts at the end of the list even that out, and neighbours read the same keys.
int blocks_of_section(const ForwardPlan& plan);

}  // namespace flashtile
