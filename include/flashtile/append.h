// This file declares the kernel that runs before one over a cache: it writes new rows to the cache and rotates q.
#pragma once

#include "flashtile/kvcache.h"

namespace flashtile {

/// Launches the kernel that writes k_new and v_new into the cache, rotated if that is asked for, and the rotated q into
/// `memory` at plan.rotated_at. It launches nothing where there is nothing to write.
void append(const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream);

}  // namespace flashtile
