// This file loads tiles by TMA, the copy engine of Hopper: one thread starts the copy, and a barrier in shared memory
// completes when all bytes have landed.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/load/tensor_map.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// TmaRows are the rows of one batch entry in the coordinates of head_tiles' maps.
struct TmaRows {
  std::uint32_t before = 0;  // positions before the first of them
  int batch = 0;             // or the shift, where the batch is ragged
  int way_back = 0;

  CUTE_DEVICE static TmaRows dense(int batch) { return {0, batch, 0}; }
  /// Returns the coordinates of the `rows` rows from `first` on.
  CUTE_DEVICE static TmaRows ragged(int first, int rows) { return {kEndOfRows - rows, first + rows, kWayBack}; }
  /// Returns those of the first `rows` rows of `span`.
  CUTE_DEVICE static TmaRows of(Spans const& spans, int batch, Span span, int rows) {
    return spans.ragged() ? ragged(span.first, rows) : dense(batch);
  }

  /// Returns the position of a row. Behind the last row of a sequence it is outside the tensor: kEndOfRows and what
  /// follows are negative as signed numbers.
  CUTE_DEVICE int position(int row) const { return int(before + row); }
};

/// Loads the rows of one box of the map, from `row` on, all columns, box after box, into a tile of kRows rows in shared
/// memory. `shared` is the first of these rows in that tile; `head` is the first of a pack, where the map has packs.
template <int kRows, int kColumns, int kColumnsPerBox, class Element>
CUTE_DEVICE void load_tile(CUtensorMap const& map, std::uint64_t* barrier, Element* shared, TmaRows const& rows,
                           int row, int head) {
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kColumnsPerBox) {
    cute::SM90_TMA_LOAD_5D::copy(&map, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                 shared + column * kRows, column, head, rows.position(row), rows.batch, rows.way_back);
  }
}

}  // namespace flashtile
