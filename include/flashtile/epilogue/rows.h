// This file has what every forward epilogue does with its rows before it stores them.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Returns the sinks of the rows of one thread, whose coordinates in the tile are `coord` (row, head_dim); −inf is
/// none.
template <Features kFeatures, class Coord>
CUTE_DEVICE auto sinks_of_rows(ForwardParams const& params, TileCoord tile, Coord const& coord) {
  using namespace cute;
  array<float, size<0>(Coord{}.layout())> sinks;
  CUTE_UNROLL
  for (int r = 0; r < int(sinks.size()); ++r) {
    sinks[r] = -kInfinity;
    if constexpr (includes(kFeatures, Features::kSinks)) {
      const QueriesOfRows of_rows(params.scores.packing, 0, get<0>(coord(r / 2 * 2, 0)));
      if (params.sinks != nullptr) sinks[r] = params.sinks[tile.head + of_rows.head(r)];
    }
  }
  return sinks;
}

/// Finishes the softmax of the rows of one thread, with sinks among their weights, and writes their lse and what a
/// backward needs of them. Returns what their outputs have to be multiplied with. `coord` (row, head_dim) has their
/// coordinates in the tile. Rows of `queries` that do not count come out as rows that see nothing, sinks or not.
template <Features kFeatures, class Coord, class Softmax, class Sinks>
CUTE_DEVICE auto finish_rows(ForwardParams const& params, TileCoord tile, Span queries, Coord const& coord,
                             Softmax& softmax, Sinks const& sinks, int first_row) {
  using namespace cute;
  softmax.finish_sums();
  RowTotal rows[Softmax::kRowCount];
  array<float, Softmax::kRowCount> normaliser;
  const auto queries_of = [&](int r) {
    return QueriesOfRows(params.scores.packing, first_row, get<0>(coord(r / 2 * 2, 0)));
  };
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const QueriesOfRows of_rows = queries_of(r);
    const bool counts = of_rows.query(r) < queries.used;  // what comes out of idle rows, nobody stores
    if (!counts) softmax.row[r] = {};
    rows[r] = softmax.row[r].total(counts ? sinks[r] : -kInfinity, params.scores.map.unit);
    normaliser[r] = rows[r].normaliser;
    if constexpr (includes(kFeatures, Features::kDropout)) normaliser[r] *= params.dropout.scale;
  }
  int lane;  // read anew, lest it takes a register from the mainloop
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  if (!params.rows.wanted() || lane % 4 != 0) return normaliser;  // the first thread of each quad writes
  const std::int64_t first = params.rows.strides.at(tile.batch, tile.head, queries.first);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(coord); ++r) {
    const QueriesOfRows of_rows = queries_of(r);
    if (of_rows.query(r) < min(queries.size, of_rows.end))
      params.rows.store(first + of_rows.head(r) * params.rows.strides.head + of_rows.query(r), rows[r].finished(),
                        params.scores.map.unit);
  }
  return normaliser;
}

}  // namespace flashtile
