// This file declares the kernel that runs before those which find the largest logits on a GPU.
#pragma once

#include "flashtile/largest_scores.h"

namespace flashtile {

/// Launches the kernel that sets the largest logits of `batch` entries to −inf. The next one in the stream may start
/// beside it: what comes before is done by then.
void begin_max_logits(const LargestScores& largest, int batch, Device device, Stream stream);

}  // namespace flashtile
