// This epilogue normalises and rounds the finished rows of one tile and stores them with their lse.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/epilogue/rows.h"
#include "flashtile/epilogue/tile.h"
#include "flashtile/params.h"

namespace flashtile {

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
