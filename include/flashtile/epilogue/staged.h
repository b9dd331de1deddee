// This epilogue puts the finished rows of one tile into shared memory, from where TMA takes them: no warp waits for
// them to leave before it comes to its next tile.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/load/tma.h"
#include "flashtile/math/round.h"
#include "flashtile/params.h"

namespace flashtile {

/// A warp rounds its 16 rows of accumulators of a wgmma TiledMma, seen as (row, column), into a tile of shared memory,
/// whose rows they are from `staging` on. The tile has the layout `Layout` (row, column), in swizzled boxes of
/// kColumnsPerBox columns.
template <class Layout, int kColumnsPerBox, class Element, class Rows>
CUTE_DEVICE void stage_rows(Rows const& rows, Element* staging, int lane) {
  using namespace cute;
  constexpr int kColumnsOfThread = size<1>(decltype(rows.layout()){});  // two of each block of 8
  using Places = decltype(as_position_independent_swizzle_layout(Layout{}));
  // Of four 8 × 8 blocks each lane says where one row of eight goes. In a box the swizzle changes those bits of an
  // address that count columns by an exclusive or with some that count rows. So the next blocks' are one further.
  const std::uint32_t first = cast_smem_ptr_to_uint(staging + Places{}(lane % 16, lane / 16 * 8));
  CUTE_UNROLL
  for (int c = 0; c < kColumnsOfThread; c += 4) {
    const int column = 4 * c, of_box = column % kColumnsPerBox;
    const std::uint32_t place =
        (first ^ of_box * sizeof(Element)) + (column - of_box) * size<0>(Layout{}) * sizeof(Element);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place),
                 "r"(round_pair<Element>(rows(0, c), rows(0, c + 1))),
                 "r"(round_pair<Element>(rows(1, c), rows(1, c + 1))),
                 "r"(round_pair<Element>(rows(0, c + 2), rows(0, c + 3))),
                 "r"(round_pair<Element>(rows(1, c + 2), rows(1, c + 3)))
                 : "memory");
  }
}

/// A warp stages its 16 rows, of which the first is `first_row`, of accumulators of a wgmma TiledMma, seen as (row,
/// head_dim). Staged rows have the layout `Layout` (row, head_dim), in boxes of kColumnsPerBox columns.
template <class Layout, int kColumnsPerBox, class Element, class Rows>
CUTE_DEVICE void stage_and_store_rows(ForwardParams const& params, CUtensorMap const& map, TileCoord tile, Span queries,
                                      Rows const& rows, Element* staging, int first_row) {
  using namespace cute;
  constexpr int kRows = size<0>(Layout{});
  constexpr int kColumns = size<1>(Layout{});
  static_assert(kRows == 16);
  int lane;  // read anew, lest addresses that depend on it take registers from the mainloop
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  if (lane == 0) tma_store_wait<0>();  // waits until TMA has read the rows of the tile before
  __syncwarp();                        // the staging buffer is free for all lanes
  stage_rows<Layout, kColumnsPerBox>(rows, staging, lane);
  tma_store_fence();
  __syncwarp();  // all lanes have staged their rows
  const int query = params.scores.packing.queries_of(first_row);
  if (lane == 0 && query < queries.size) {
    const TmaRows rows_of_out = TmaRows::of(params.sequences.q, tile.batch, queries, queries.size);
    CUTE_UNROLL
    for (int column = 0; column < kColumns; column += kColumnsPerBox) {
      SM90_TMA_STORE_5D::copy(&map, staging + column * kRows, column, tile.head, rows_of_out.position(query),
                              rows_of_out.batch, rows_of_out.way_back);
    }
    tma_store_arrive();
  }
}

}  // namespace flashtile
