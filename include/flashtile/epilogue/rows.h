// What every forward epilogue does with its rows before it stores them.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Completes the softmax of the rows of one thread, sinks among their weights, and writes their lse. Returns what their
/// outputs have to be multiplied with. `coord`, (row, head_dim), holds their places in the tile. Rows of `queries` that
/// do not count come out as rows that see nothing, sinks or not.
template <bool kEveryOption, class Coord, class Softmax>
CUTE_DEVICE auto finish_rows(ForwardParams const& params, TileCoord tile, Span queries, Coord const& coord,
                             Softmax& softmax, int first_row) {
  using namespace cute;
  softmax.finish();
  const int first_head = params.packing.first_head(tile.head);
  array<float, Softmax::kRowCount> normaliser;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const bool counts = params.packing.query(first_row + get<0>(coord(r, 0))) < queries.used;
    if (!counts) softmax.row[r] = {};
    if constexpr (kEveryOption) {
      const int head = first_head + params.packing.head(first_row + get<0>(coord(r, 0)));
      const float sink_log2 = params.sinks == nullptr || !counts ? -kInfinity : kLog2e * params.sinks[head];
      normaliser[r] = params.dropout.scale * softmax.row[r].join(sink_log2);
      normaliser[r] *= softmax.row[r].normaliser();
    } else {
      normaliser[r] = softmax.row[r].normaliser();
    }
  }
  if (params.lse == nullptr || get<1>(coord(0, 0)) != 0) return normaliser;  // the first thread of each quad writes
  float* const lse = params.lse + params.lse_strides.at(tile.batch, first_head, queries.first);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const int row = first_row + get<0>(coord(r, 0));
    const int query = params.packing.query(row);
    if (query < queries.size) lse[params.packing.head(row) * params.lse_strides.head + query] = softmax.row[r].lse();
  }
  return normaliser;
}

}  // namespace flashtile
