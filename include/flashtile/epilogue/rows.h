// What every forward epilogue does with its rows before it stores them.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Normalises the rows (row, head_dim) of one thread, sinks among their weights, and writes their lse. `coord` holds
/// their places in the tile.
template <class Rows, class Coord, class Softmax>
CUTE_DEVICE void finish_rows(ForwardParams const& params, TileCoord tile, Rows&& rows, Coord const& coord,
                             Softmax& softmax, int first_row) {
  using namespace cute;
  softmax.finish();
  const int first_head = params.packing.first_head(tile.head);
  float normaliser[Softmax::kRowCount];
  CUTE_UNROLL
  for (int r = 0; r < size<0>(rows); ++r) {
    normaliser[r] = params.dropout.scale;
    if (params.sinks != nullptr) {
      const int head = first_head + params.packing.head(first_row + get<0>(coord(r, 0)));
      normaliser[r] *= softmax.row[r].join(kLog2e * params.sinks[head]);
    }
    normaliser[r] *= softmax.row[r].normaliser();
  }
  scale_rows(rows, normaliser);
  if (params.lse == nullptr || get<1>(coord(0, 0)) != 0) return;  // the first thread of each quad writes
  float* lse = params.lse + (std::int64_t(tile.batch) * params.heads + first_head) * params.lengths.q;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const int row = first_row + get<0>(coord(r, 0));
    const int query = params.packing.query(row);
    if (query < params.lengths.q) lse[params.packing.head(row) * params.lengths.q + query] = softmax.row[r].lse();
  }
}

}  // namespace flashtile
