// What every forward epilogue does with its rows before it stores them.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Completes the softmax of the rows of one thread, sinks among their weights, and writes their lse. Returns what their
/// outputs have to be multiplied with. `coord`, (row, head_dim), holds their places in the tile.
template <bool kDrops, class Coord, class Softmax>
CUTE_DEVICE auto finish_rows(ForwardParams const& params, TileCoord tile, Coord const& coord, Softmax& softmax,
                             int first_row) {
  using namespace cute;
  softmax.finish();
  const float scale = kDrops ? params.dropout.scale : 1.0f;
  const int first_head = params.packing.first_head(tile.head);
  array<float, Softmax::kRowCount> normaliser;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) normaliser[r] = scale * softmax.row[r].normaliser();
  if (params.sinks != nullptr) [[unlikely]] {  // apart, since without sinks the few instructions cost 4 % at S = 512
    CUTE_UNROLL
    for (int r = 0; r < size<0>(coord); ++r) {
      const int head = first_head + params.packing.head(first_row + get<0>(coord(r, 0)));
      const float factor = softmax.row[r].join(kLog2e * params.sinks[head]);
      normaliser[r] = scale * factor * softmax.row[r].normaliser();
    }
  }
  if (params.lse == nullptr || get<1>(coord(0, 0)) != 0) return normaliser;  // the first thread of each quad writes
  float* lse = params.lse + (std::int64_t(tile.batch) * params.heads + first_head) * params.lengths.q;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const int row = first_row + get<0>(coord(r, 0));
    const int query = params.packing.query(row);
    if (query < params.lengths.q) lse[params.packing.head(row) * params.lengths.q + query] = softmax.row[r].lse();
  }
  return normaliser;
}

}  // namespace flashtile
