// This epilogue puts the finished rows of one tile into shared memory, from where TMA takes them: no warp waits for
// them to leave before it comes to its next tile.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/load/tma.h"
#include "flashtile/math/round.h"
#include "flashtile/params.h"

namespace flashtile {

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
  Tensor staged = make_tensor(make_smem_ptr(staging), Layout{});  // (row, head_dim)
  CUTE_UNROLL
  for (int c = 0; c < kColumns / 16; ++c) {
    // These are four 8 × 8 blocks; each lane says where one row of eight goes.
    SM90_U32x4_STSM_N::copy(round_pair<Element>(rows(0, 4 * c), rows(0, 4 * c + 1)),
                            round_pair<Element>(rows(1, 4 * c), rows(1, 4 * c + 1)),
                            round_pair<Element>(rows(0, 4 * c + 2), rows(0, 4 * c + 3)),
                            round_pair<Element>(rows(1, 4 * c + 2), rows(1, 4 * c + 3)),
                            *reinterpret_cast<uint128_t*>(&staged(lane % 16, 16 * c + lane / 16 * 8)));
  }
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
