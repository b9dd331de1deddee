// Tiles by TMA, the copy engine of Hopper: one thread asks, and a barrier in shared memory is told when all has landed.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/tensor_map.h"

namespace flashtile {

/// Loads the rows of one box of the map, from `position` on, all columns, box after box, into a tile of kRows rows in
/// shared memory. `shared` is the first of them in that tile; `head` counts packs of heads where the map has such.
template <int kRows, int kColumns, int kColumnsPerBox, class Element>
CUTE_DEVICE void load_tile(CUtensorMap const& map, std::uint64_t* barrier, Element* shared, int position, int head,
                           int batch) {
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kColumnsPerBox) {
    cute::SM90_TMA_LOAD_5D::copy(&map, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                 shared + column * kRows, column, 0, position, head, batch);
  }
}

}  // namespace flashtile
