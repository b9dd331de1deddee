// How the persistent kernel orders its tiles.
#pragma once

#include "flashtile/plan.h"

namespace flashtile {

/// PersistentScheduler::heads_at_once for a plan that has all the rest. Sections are large enough for neighbours to
/// share keys and values; of those that divide the work as well as any, 64 tiles are the fastest, and beyond that the
/// fewest (docs/performance.md). Remembers what it found.
int heads_at_once(const ForwardPlan& plan);

}  // namespace flashtile
