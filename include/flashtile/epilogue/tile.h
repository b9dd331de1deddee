// This file stores a tile of accumulators of mma.sync.
#pragma once

#include <cute/tensor.hpp>

namespace flashtile {

/// Rounds the accumulators (mma, m, n) of `Mma` and stores the first `rows` rows and `columns` columns of their tile at
/// `origin`. They go through `staging`, (M, N) in shared memory, so that they leave in 16-byte stores of Load's shape.
/// All threads wait for each other before `staging` is written and before it is read; callers need one more barrier
/// before they write there again.
template <class Mma, class Load, class Accumulator, class Staging, class Element>
CUTE_DEVICE void store_tile(Accumulator const& acc, Staging&& staging, Element* origin, std::int64_t row_stride,
                            int rows, int columns, int thread) {
  using namespace cute;
  Tensor rounded = make_fragment_like<Element>(acc);
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) rounded(i) = Element(acc(i));

  const auto copy_acc = make_tiled_copy_C(Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<32>, Element>{}, Mma{});
  auto copy_acc_thread = copy_acc.get_slice(thread);
  __syncthreads();  // no thread still reads what staging held
  copy(copy_acc, copy_acc_thread.retile_S(rounded), copy_acc_thread.partition_D(staging));
  __syncthreads();  // the tile is complete: threads now store other threads' elements

  using StoreAtom = Copy_Atom<UniversalCopy<uint128_t>, Element>;
  auto store_thread =
      make_tiled_copy(StoreAtom{}, typename Load::ThreadLayout{}, typename Load::VectorLayout{}).get_slice(thread);
  const auto tile_shape = product_each(shape(staging));
  Tensor gX = make_tensor(make_gmem_ptr(origin), tile_shape, make_stride(row_stride, _1{}));
  Tensor tGsX = store_thread.partition_S(staging);                           // (vector, row, column)
  Tensor tGgX = store_thread.partition_D(gX);                                // (vector, row, column)
  Tensor tGcX = store_thread.partition_D(make_identity_tensor(tile_shape));  // (vector, row, column)
  CUTE_UNROLL
  for (int r = 0; r < size<1>(tGgX); ++r) {
    if (get<0>(tGcX(0, r, 0)) >= rows) continue;
    CUTE_UNROLL
    for (int c = 0; c < size<2>(tGgX); ++c) {
      if (get<1>(tGcX(0, 0, c)) < columns) copy(StoreAtom{}, tGsX(_, r, c), tGgX(_, r, c));
    }
  }
}

}  // namespace flashtile
