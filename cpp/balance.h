// How the persistent kernel orders its tiles.
#pragma once

#include "flashtile/plan.h"

namespace flashtile {

/// PersistentScheduler::heads_at_once for a plan that has all the rest: of the sections that are large enough for
/// neighbours to share keys and values, the smallest that divides the work as well as any. Remembers what it found.
int heads_at_once(const ForwardPlan& plan);

}  // namespace flashtile
