// How TMA, the copy engine of Hopper, is told where a tensor lies.
#pragma once

#include <cuda.h>

#include "flashtile/math/head_packing.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// Where the rows of a ragged tensor end for TMA, whatever their number.
constexpr std::uint32_t kEndOfRows = 1u << 31;
/// Of the last coordinate, which leads back from there to the tensor.
constexpr int kWayBack = 1 << 30;

/// Describes the (rows, columns) tiles of a (B, S, H, D) tensor to TMA: the coordinates of a tile are column, head,
/// position, batch, 0. A box is as wide as one swizzled row of shared memory, 128 or 64 bytes, and has the heads of one
/// pack; what lies outside the tensor is read as zero and not written. An empty tensor has none.
///
/// `ragged`: of a (1, T, H, D) tensor, in which what lies behind the end of a sequence shall count as outside. For that
/// there are two coordinates that move along the rows, of which the one ends at kEndOfRows, the other does not matter:
/// row r of n from f on is position kEndOfRows − n + r and, in the place of the batch, shift f + n. That is kEndOfRows
/// too far: the last coordinate, kWayBack, adds 2^64 less so many rows, for addresses begin anew at 2^64. So the map
/// has the tensor's own address; it needs one in memory of this GPU, which TMA asks for even where a box lies outside.
/// See TmaRows.
CUtensorMap head_tiles(const TensorView& tensor, int rows, int columns_per_box, bool ragged, HeadPacking packing = {});

/// Describes a matrix of floats, its rows one after the other, to TMA, in boxes of (rows_per_box, columns_per_box); the
/// coordinates are column, row.
CUtensorMap float_boxes(float* matrix, std::int64_t rows, std::int64_t columns, int rows_per_box, int columns_per_box,
                        Device device);

}  // namespace flashtile
