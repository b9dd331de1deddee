// This file has what every forward epilogue does with its rows before it stores them.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Finishes the softmax of the rows of one thread, with sinks among their weights, and writes their lse and what a
/// backward needs of them. Returns what their outputs have to be multiplied with. `coord` (row, head_dim) has their
/// coordinates in the tile. Rows of `queries` that do not count come out as rows that see nothing, sinks or not.
template <Features kFeatures, class Coord, class Softmax>
CUTE_DEVICE auto finish_rows(ForwardParams const& params, TileCoord tile, Span queries, Coord const& coord,
                             Softmax& softmax, int first_row) {
  using namespace cute;
  softmax.finish_sums();
  HeadPacking const& packing = params.scores.packing;
  const int first_head = packing.first_head(tile.head);
  RowTotal rows[Softmax::kRowCount];
  array<float, Softmax::kRowCount> normaliser;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const int row = get<0>(coord(r, 0));
    const bool counts = packing.query(first_row, row) < queries.used && !packing.idle(row);
    if (!counts) softmax.row[r] = {};
    float sink = -kInfinity;
    if constexpr (includes(kFeatures, Features::kSinks)) {
      if (params.sinks != nullptr && counts) sink = params.sinks[first_head + packing.head(row)];
    }
    rows[r] = softmax.row[r].total(sink, params.scores.map.unit);
    normaliser[r] = rows[r].normaliser;
    if constexpr (includes(kFeatures, Features::kDropout)) normaliser[r] *= params.dropout.scale;
  }
  if (!params.rows.wanted() || get<1>(coord(0, 0)) != 0) return normaliser;  // the first thread of each quad writes
  const std::int64_t first = params.rows.strides.at(tile.batch, first_head, queries.first);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const int row = get<0>(coord(r, 0)), query = packing.query(first_row, row);
    if (query < queries.size && !packing.idle(row))
      params.rows.store(first + packing.head(row) * params.rows.strides.head + query, rows[r].finished(),
                        params.scores.map.unit);
  }
  return normaliser;
}

}  // namespace flashtile
