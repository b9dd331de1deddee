// This file starts Hopper's warpgroup matmuls, which run while the warps go on, and waits for them.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace flashtile {

/// Returns the columns of a TMA box: 128 bytes of them, or 64 where columns are no multiple of that.
constexpr int columns_per_box(int columns, int bytes_of_element = 2) {
  return columns * bytes_of_element % 128 == 0 ? 128 / bytes_of_element : 64 / bytes_of_element;
}

/// These are the layouts that tiles in shared memory repeat: boxes of a few rows, which are as wide as a row of the
/// swizzle, as rows (K) and as columns (MN).
template <class Element, int kBytesOfRow>
struct SwizzledAtomsOfBytes;
template <class Element>
struct SwizzledAtomsOfBytes<Element, 128> {
  using K = cute::SM90::GMMA::Layout_K_SW128_Atom<Element>;
  using MN = cute::SM90::GMMA::Layout_MN_SW128_Atom<Element>;
};
template <class Element>
struct SwizzledAtomsOfBytes<Element, 64> {
  using K = cute::SM90::GMMA::Layout_K_SW64_Atom<Element>;
  using MN = cute::SM90::GMMA::Layout_MN_SW64_Atom<Element>;
};
template <class Element>
struct SwizzledAtomsOfBytes<Element, 32> {
  using K = cute::SM90::GMMA::Layout_K_SW32_Atom<Element>;
  using MN = cute::SM90::GMMA::Layout_MN_SW32_Atom<Element>;
};
template <class Element, int kColumnsPerBox>
using SwizzledAtoms = SwizzledAtomsOfBytes<Element, kColumnsPerBox* int(sizeof(Element))>;

/// SmemTile is the layout of tiles of (rows, columns), as TMA leaves them in shared memory, box by box; boxes are as
/// wide as they can be, unless it is said.
template <class Element, int kRows, int kColumns, int kTiles,
          int kColumnsPerBox = columns_per_box(kColumns, sizeof(Element))>
using SmemTile = decltype(cute::tile_to_shape(typename SwizzledAtoms<Element, kColumnsPerBox>::K{},
                                              cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kTiles>>{}));

/// SmemTileT is the same memory as (columns, rows).
template <class Element, int kRows, int kColumns, int kTiles, int kColumnsPerBox = columns_per_box(kColumns)>
using SmemTileT = decltype(cute::tile_to_shape(typename SwizzledAtoms<Element, kColumnsPerBox>::MN{},
                                               cute::Shape<cute::Int<kColumns>, cute::Int<kRows>, cute::Int<kTiles>>{},
                                               cute::Step<cute::_2, cute::_1, cute::_3>{}));

/// Returns `x`, which is the same in all lanes, so that the compiler knows. Descriptors of matmuls are in uniform
/// registers; what it does not know to be uniform it computes in others and moves over before every single wgmma.
CUTE_DEVICE int uniform(int x) {
  return __shfl_sync(0xffffffff, x, 0);
}

/// Starts c = a · b, or c += a · b, asynchronously.
template <class Mma, class A, class B, class C>
CUTE_DEVICE void start_matmul(Mma& mma, A const& a, B const& b, C& c, cute::SM90::GMMA::ScaleOut accumulate) {
  using namespace cute;
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = accumulate;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    gemm(mma, a(_, _, k), b(_, _, k), c);
    mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

/// Waits until at most kPending of the matmuls that were started last are unfinished.
template <int kPending, class C>
CUTE_DEVICE void wait_matmul(C& c) {
  cute::warpgroup_wait<kPending>();
  cute::warpgroup_fence_operand(c);
}

}  // namespace flashtile
