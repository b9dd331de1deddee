// This epilogue stores the partial result of a tile over some of its keys: its rows before they are normalised, and
// their softmax so far.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/epilogue/partial_gradient.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Returns whether a row of the tile that begins with `first_row` is neither idle nor behind the last query.
CUTE_DEVICE bool has_query(HeadPacking const& packing, int first_row, int row, Span queries) {
  return packing.query(first_row, row) < queries.size && !packing.idle(row);
}

/// Stores `rows` (row, head_dim) of a thread, whose coordinates in the tile are `coord`, as the result over a split of
/// the tile's keys, whose place is given (see ForwardParts), and the rows' states, whose sums are complete. A quad
/// stores 32 neighbouring bytes of a row at a time. Rows that no query has are left out: where a tile has one query,
/// those are most of it.
template <int kM, class Rows, class Coord, class Softmax>
CUTE_DEVICE void store_part(ForwardParams const& params, int m_block, Span queries, std::int64_t place,
                            Rows const& rows, Coord const& coord, Softmax const& softmax) {
  using namespace cute;
  const ForwardParts& parts = params.parts;
  const std::int64_t first = place * kM;
  const int first_column = get<1>(coord(0, 0)), columns = params.head_dim_v - first_column;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(rows); ++r) {
    if (!has_query(params.scores.packing, m_block * kM, get<0>(coord(r, 0)), queries)) continue;
    const std::int64_t row = first + get<0>(coord(r, 0));
    if (first_column == 0) parts.state[row] = softmax.row[r];  // the first thread of each quad writes it
    float* const out = parts.out + row * params.head_dim_v + first_column;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(rows); c += 2)  // a thread has two columns of each block of 8
      store_pair_if(4 * c < columns, out + 4 * c, rows(r, c), rows(r, c + 1));
  }
}

}  // namespace flashtile
