// This file describes tensors to TMA, the copy engine of Hopper.
#pragma once

#include <cuda.h>

#include "flashtile/math/head_packing.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// For TMA the rows of a ragged tensor end here, whatever their number.
constexpr std::uint32_t kEndOfRows = 1u << 31;
/// With this value the last coordinate leads the address back from there to the tensor: the way back.
constexpr int kWayBack = 1 << 30;

/// Describes the (rows, columns) tiles of a (B, S, H, D) tensor to TMA: the coordinates of a tile are column, head,
/// position, batch, 0. A box is as wide as one swizzled row of shared memory, 128, 64 or 32 bytes, and has the heads of
/// one pack (see HeadPacking). Elements outside the tensor are read as zero and not written. An empty tensor gets an
/// empty map, and so does one that is left out.
///
/// `ragged` describes a (1, T, H, D) tensor in which what lies behind the end of a sequence counts as outside. For that
/// two coordinates move along the rows: the position, which ends at kEndOfRows, and in place of the batch a shift,
/// whose end does not matter. Row r of a sequence of n rows that begins at row f has position kEndOfRows − n + r and
/// shift f + n. That is kEndOfRows too far, so the last coordinate, kWayBack, adds 2^64 less so many rows, as addresses
/// wrap around at 2^64. So the map has the tensor's own address, which must be one in memory of this GPU: TMA asks for
/// that even where a box lies outside. See TmaRows.
CUtensorMap head_tiles(const TensorView& tensor, int rows, int columns_per_box, bool ragged, HeadPacking packing = {});

/// Describes a matrix of floats, whose rows lie one after the other, to TMA, in boxes of (rows_per_box,
/// columns_per_box); the coordinates are column, row.
CUtensorMap float_boxes(float* matrix, std::int64_t rows, std::int64_t columns, int rows_per_box, int columns_per_box,
                        Device device);

}  // namespace flashtile
