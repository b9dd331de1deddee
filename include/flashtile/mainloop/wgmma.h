// This file starts Hopper's warpgroup matmuls, which run while the warps go on, and waits for them.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace flashtile {

/// SmemTile is the layout of tiles of (rows, columns), a multiple of 64 columns, as TMA leaves them in shared memory.
template <class Element, int kRows, int kColumns, int kTiles>
using SmemTile = decltype(cute::tile_to_shape(cute::SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                              cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kTiles>>{}));

/// SmemTileT is the same memory as (columns, rows).
template <class Element, int kRows, int kColumns, int kTiles>
using SmemTileT = decltype(cute::tile_to_shape(cute::SM90::GMMA::Layout_MN_SW128_Atom<Element>{},
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
