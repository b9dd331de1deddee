// This epilogue normalises and rounds the finished rows of one tile and stores them with their lse.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/epilogue/rows.h"
#include "flashtile/epilogue/tile.h"
#include "flashtile/params.h"

namespace flashtile {

/// Raises the largest logits of heads to those of the rows of one thread, if they are wanted. `coord` (row, head_dim)
/// has the rows' coordinates in the tile.
template <class Coord, class Softmax>
CUTE_DEVICE void raise_largest(ForwardParams const& params, TileCoord tile, Span queries, Coord const& coord,
                               Softmax const& softmax, int first_row) {
  LargestScores const& largest = params.rows.largest;
  if (!largest.wanted()) return;
  const bool of_one_head = params.scores.packing.heads == 1;
  float of_warp = -kInfinity;
  CUTE_UNROLL
  for (int r = 0; r < Softmax::kRowCount; ++r) {
    const QueriesOfRows of_rows(params.scores.packing, first_row, cute::get<0>(coord(r / 2 * 2, 0)));
    const float logit = softmax.largest_of_row(r) * params.scores.map.unit;
    if (of_rows.query(r) >= min(queries.used, of_rows.end)) continue;  // what idle rows have, nobody loaded
    of_warp = fmaxf(of_warp, logit);
    if (of_one_head || threadIdx.x % 4 != 0) continue;
    const int head = tile.head + of_rows.head(r);
    if (logit > largest.so_far(tile.batch, head)) largest.raise(tile.batch, head, logit);
  }
  if (!of_one_head) return;
  CUTE_UNROLL
  for (int bit = 4; bit < 32; bit *= 2) of_warp = fmaxf(of_warp, __shfl_xor_sync(0xffffffff, of_warp, bit));
  if (threadIdx.x % 32 == 0 && of_warp > largest.so_far(tile.batch, tile.head))
    largest.raise(tile.batch, tile.head, of_warp);
}

/// It takes accumulators of a TiledMma whose warps own whole rows. The tile goes through shared memory so that it
/// leaves in 16-byte stores: through `staging`, in the swizzled layout of Q, whose memory it may reuse.
template <class Mainloop>
struct FinalEpilogue {
  using Element = typename Mainloop::Element;
  static constexpr int kM = Mainloop::kM;
  static constexpr int kHeadDim = Mainloop::kHeadDim;

  template <class Accumulator, class Softmax>
  CUTE_DEVICE static void store(ForwardParams const& params, TileCoord tile, Span queries, Accumulator& tOrO,
                                Softmax& softmax, Element* staging, int thread) {
    using namespace cute;
    typename Mainloop::TiledMma mma;
    auto mma_thread = mma.get_slice(thread);
    const int first_row = tile.m_block * kM;
    Tensor cO = make_identity_tensor(Shape<Int<kM>, Int<kHeadDim>>{});  // (M, head_dim)
    Tensor tOcO = rows_and_columns(mma_thread.partition_C(cO));         // (row, head_dim)
    raise_largest(params, tile, queries, tOcO, softmax, first_row);
    const auto sinks = sinks_of_rows<Mainloop::kFeatures>(params, tile, tOcO);
    scale_rows(rows_and_columns(tOrO),
               finish_rows<Mainloop::kFeatures>(params, tile, queries, tOcO, softmax, sinks, first_row));

    Element* origin = static_cast<Element*>(params.out) + params.out_strides.at(tile.batch, queries.first + first_row) +
                      tile.head * params.out_strides.head;
    store_tile<typename Mainloop::TiledMma, typename Mainloop::Load>(
        tOrO, make_tensor(make_smem_ptr(staging), typename Mainloop::SmemLayoutQ{}), origin, params.out_strides.row,
        queries.size - first_row, params.head_dim_v, thread);
  }
};

}  // namespace flashtile
