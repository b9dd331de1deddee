// This file loads tiles by cp.async, 16 bytes a thread (Ampere and later).
#pragma once

#include <cute/tensor.hpp>

namespace flashtile {

/// CpAsyncTile loads (rows, head_dim) tiles of a row-major matrix into swizzled shared memory. Elements outside the
/// matrix are written as zero and never read.
template <class Element, int kColumnsPerAtom, int kThreads>
struct CpAsyncTile {
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kThreadsPerRow = kColumnsPerAtom / kVector;

  using Atom = cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>, Element>;
  using ThreadLayout = cute::Layout<cute::Shape<cute::Int<kThreads / kThreadsPerRow>, cute::Int<kThreadsPerRow>>,
                                    cute::Stride<cute::Int<kThreadsPerRow>, cute::_1>>;
  using VectorLayout = cute::Layout<cute::Shape<cute::_1, cute::Int<kVector>>>;
  using TiledCopy = decltype(cute::make_tiled_copy(Atom{}, ThreadLayout{}, VectorLayout{}));

  // The rows that one pass of all threads copies must divide the tile: CuTe would round up, past shared memory's end.
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;

  /// Loads a tile, from whose origin on the matrix has `rows` rows and `columns` columns left.
  template <class Global, class Shared>
  CUTE_DEVICE static void load(Global const& gX, Shared const& sX, int rows, int columns, int thread) {
    using namespace cute;
    auto copy_thread = TiledCopy{}.get_slice(thread);
    Tensor tXgX = copy_thread.partition_S(gX);                                             // (vector, row, column)
    Tensor tXsX = copy_thread.partition_D(sX);                                             // (vector, row, column)
    Tensor tXcX = copy_thread.partition_S(make_identity_tensor(product_each(shape(sX))));  // (vector, row, column)
    CUTE_UNROLL
    for (int r = 0; r < size<1>(tXsX); ++r) {
      const bool row_exists = get<0>(tXcX(0, r, 0)) < rows;
      CUTE_UNROLL
      for (int c = 0; c < size<2>(tXsX); ++c) {
        const bool exists = row_exists && get<1>(tXcX(0, 0, c)) < columns;
        copy(Atom{}.with(exists), tXgX(_, r, c), tXsX(_, r, c));
      }
    }
  }
};

/// Returns the (rows, head_dim) tile that starts at `row` of one head of a (B, S, H, D) tensor.
template <int kRows, int kHeadDim, class Element, class Strides>
CUTE_DEVICE auto head_tile(const void* base, Strides const& strides, int batch, int head, int row) {
  using namespace cute;
  const Element* origin =
      static_cast<const Element*>(base) + batch * strides.batch + head * strides.head + row * strides.row;
  return make_tensor(make_gmem_ptr(origin), Shape<Int<kRows>, Int<kHeadDim>>{}, make_stride(strides.row, _1{}));
}

}  // namespace flashtile
