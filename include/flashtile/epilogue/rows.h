// What every forward epilogue does with its rows before it stores them.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Normalises the rows (row, head_dim) of one thread and writes their lse. `coord` holds their places in the tile.
template <class Rows, class Coord, class Softmax>
CUTE_DEVICE void finish_rows(ForwardParams const& params, TileCoord tile, Rows&& rows, Coord const& coord,
                             Softmax& softmax, int first_row) {
  using namespace cute;
  softmax.finish();
  float normaliser[Softmax::kRowCount];
  CUTE_UNROLL
  for (int r = 0; r < size<0>(rows); ++r) normaliser[r] = softmax.row[r].normaliser();
  scale_rows(rows, normaliser);
  if (params.lse == nullptr || get<1>(coord(0, 0)) != 0) return;  // the first thread of each quad writes
  const std::int64_t first_head = std::int64_t(tile.batch) * params.heads + params.packing.first_head(tile.head);
  float* lse = params.lse + first_head * params.lengths.q;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const int row = first_row + get<0>(coord(r, 0));
    const int query = params.packing.query(row);
    if (query < params.lengths.q) lse[params.packing.head(row) * params.lengths.q + query] = softmax.row[r].lse();
  }
}

}  // namespace flashtile
