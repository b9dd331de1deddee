// The finished rows of one tile: normalised, rounded, and written with their lse.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/epilogue/rows.h"
#include "flashtile/params.h"

namespace flashtile {

/// For accumulators of a TiledMma whose warps own whole rows. The tile goes through shared memory (`staging`, in the
/// swizzled layout of Q, whose place it may take) so that it leaves in 16-byte stores.
template <class Mainloop>
struct FinalEpilogue {
  using Element = typename Mainloop::Element;
  static constexpr int kM = Mainloop::kM;
  static constexpr int kHeadDim = Mainloop::kHeadDim;

  template <class Accumulator, class Softmax>
  CUTE_DEVICE static void store(ForwardParams const& params, TileCoord tile, Accumulator& tOrO, Softmax& softmax,
                                Element* staging, int thread) {
    using namespace cute;
    typename Mainloop::TiledMma mma;
    auto mma_thread = mma.get_slice(thread);
    const int first_row = tile.m_block * kM;
    const int rows = params.lengths.q - first_row;

    Tensor cO = make_identity_tensor(Shape<Int<kM>, Int<kHeadDim>>{});  // (M, head_dim)
    finish_rows(params, tile, rows_and_columns(tOrO), rows_and_columns(mma_thread.partition_C(cO)), softmax, first_row);

    Tensor rounded = make_fragment_like<Element>(tOrO);
    CUTE_UNROLL
    for (int i = 0; i < size(tOrO); ++i) rounded(i) = Element(tOrO(i));

    Tensor sO = make_tensor(make_smem_ptr(staging), typename Mainloop::SmemLayoutQ{});  // (M, head_dim)
    const auto copy_o = make_tiled_copy_C(Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<32>, Element>{}, mma);
    auto copy_o_thread = copy_o.get_slice(thread);
    __syncthreads();  // every warp has read its last Q from the staging memory
    copy(copy_o, copy_o_thread.retile_S(rounded), copy_o_thread.partition_D(sO));
    __syncthreads();  // the tile is complete: threads now store other threads' elements

    using StoreAtom = Copy_Atom<UniversalCopy<uint128_t>, Element>;
    auto store_thread =
        make_tiled_copy(StoreAtom{}, typename Mainloop::Load::ThreadLayout{}, typename Mainloop::Load::VectorLayout{})
            .get_slice(thread);
    Element* origin = static_cast<Element*>(params.out) + tile.batch * params.out_strides.batch +
                      tile.head * params.out_strides.head + first_row * params.out_strides.row;
    Tensor gO = make_tensor(make_gmem_ptr(origin), shape(cO), make_stride(params.out_strides.row, _1{}));
    Tensor tGsO = store_thread.partition_S(sO);  // (vector, row, column)
    Tensor tGgO = store_thread.partition_D(gO);  // (vector, row, column)
    Tensor tGcO = store_thread.partition_D(cO);  // (vector, row, column)
    CUTE_UNROLL
    for (int r = 0; r < size<1>(tGgO); ++r) {
      if (get<0>(tGcO(0, r, 0)) >= rows) continue;
      CUTE_UNROLL
      for (int c = 0; c < size<2>(tGgO); ++c) {
        if (get<1>(tGcO(0, 0, c)) < params.head_dim_v) copy(StoreAtom{}, tGsO(_, r, c), tGgO(_, r, c));
      }
    }
  }
};

}  // namespace flashtile
