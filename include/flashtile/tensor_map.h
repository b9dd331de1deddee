// How TMA, the copy engine of Hopper, is told where a tensor lies.
#pragma once

#include <cuda.h>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// Describes the (rows, columns) tiles of the heads of a (B, S, H, D) tensor to TMA. A box is as wide as one swizzled
/// row of shared memory, 128 or 64 bytes; what lies outside the tensor arrives as zero. An empty tensor has none.
CUtensorMap head_tiles(const TensorView& tensor, int rows, int columns_per_box);

}  // namespace flashtile
