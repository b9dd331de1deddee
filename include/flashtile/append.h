// Before a kernel over a cache: new rows take their places in it, and q is rotated.
#pragma once

#include "flashtile/kvcache.h"

namespace flashtile {

/// Launches the kernel that writes k_new and v_new into the cache, rotated if asked to, and the rotated q into `memory`
/// at plan.rotated_at. Nothing where there is nothing to do.
void append(const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream);

}  // namespace flashtile
