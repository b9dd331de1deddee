// Tiles by TMA, the copy engine of Hopper: one thread asks, and a barrier in shared memory is told when all has landed.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/sequence.h"
#include "flashtile/tensor_map.h"

namespace flashtile {

/// The rows of one batch entry as the maps of head_tiles count them.
struct TmaRows {
  int before = 0;  // positions before the first of them
  int batch = 0;   // or, where the batch is ragged, shift
  int last = 0;    // position

  CUTE_DEVICE static TmaRows dense(int batch) { return {0, batch, 1 << 30}; }
  /// The first `rows` of a span.
  CUTE_DEVICE static TmaRows of(Spans const& spans, int batch, Span span, int rows) {
    return spans.ragged() ? TmaRows{spans.size - rows, span.first + rows, spans.size - 1} : dense(batch);
  }

  /// Behind the last row it is that of the last: TMA takes no box for one of ragged rows that begins outside.
  CUTE_DEVICE int position(int row) const { return min(before + row, last); }
};

/// Loads the rows of one box of the map, from `row` on, all columns, box after box, into a tile of kRows rows in
/// shared memory. `shared` is the first of them in that tile; `head` counts packs of heads where the map has such.
template <int kRows, int kColumns, int kColumnsPerBox, class Element>
CUTE_DEVICE void load_tile(CUtensorMap const& map, std::uint64_t* barrier, Element* shared, TmaRows const& rows,
                           int row, int head) {
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kColumnsPerBox) {
    cute::SM90_TMA_LOAD_5D::copy(&map, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                 shared + column * kRows, column, 0, rows.position(row), head, rows.batch);
  }
}

}  // namespace flashtile
