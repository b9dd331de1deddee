// This file has the operands of the matmuls of Hopper's forward kernel, as a thread of the consumers holds them.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/math/online_softmax.h"

namespace flashtile {

/// These functions make what a consumer thread holds of each operand: registers, or descriptors of shared memory.
template <class Mainloop>
struct ForwardFragmentsSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;
  using Element = typename Mainloop::Element;
  using MmaQK = typename Mainloop::MmaQK;
  using MmaPV = typename Mainloop::MmaPV;
  using ShapeS = cute::Shape<cute::Int<Mainloop::kM>, cute::Int<Mainloop::kN>>;

  CUTE_DEVICE static auto shared_q(SharedStorage& shared) {
    return cute::make_tensor(cute::make_smem_ptr(shared.q[0]),
                             typename Mainloop::SmemLayoutQ{});  // (M, head_dim, stage)
  }
  CUTE_DEVICE static auto q(SharedStorage& shared, int thread, int warpgroup) {
    using namespace cute;
    Tensor sQ = shared_q(shared);
    if constexpr (Mainloop::kKeepQ)
      return MmaQK{}.get_slice(thread).partition_fragment_A(sQ(_, _, 0));  // (mma, m, k)
    else
      return MmaQK{}.get_slice(warpgroup * 128).partition_fragment_A(sQ);  // (mma, m, k, stage)
  }
  CUTE_DEVICE static auto k(SharedStorage& shared, int thread) {
    using namespace cute;
    Tensor sK = make_tensor(make_smem_ptr(shared.k[0]), typename Mainloop::SmemLayoutK{});  // (N, head_dim, stage)
    return MmaQK{}.get_slice(thread).partition_fragment_B(sK);                              // (mma, n, k, stage)
  }
  CUTE_DEVICE static auto v(SharedStorage& shared, int thread) {
    using namespace cute;
    Tensor sVt = make_tensor(make_smem_ptr(shared.v[0]), typename Mainloop::SmemLayoutVt{});  // (head_dim, N, stage)
    return MmaPV{}.get_slice(thread).partition_fragment_B(sVt);  // (mma, head_dim, k, stage)
  }
  CUTE_DEVICE static auto scores() { return cute::partition_fragment_C(MmaQK{}, ShapeS{}); }  // (mma, m, n)
  /// Returns the coordinates of each score in the tile.
  CUTE_DEVICE static auto places(int thread) {
    return rows_and_columns(MmaQK{}.get_slice(thread).partition_C(cute::make_identity_tensor(ShapeS{})));
  }
  CUTE_DEVICE static auto weights() {
    using namespace cute;
    constexpr int kOfWord = Mainloop::kOfWord;  // of a register
    return make_tensor<typename Mainloop::Weight>(
        Layout<Shape<Shape<Int<kOfWord>, _2, _2>, _1, Int<Mainloop::kN / 8 / kOfWord>>>{});  // (mma, m, k)
  }
  CUTE_DEVICE static auto output() {
    using namespace cute;
    return partition_fragment_C(MmaPV{}, Shape<Int<Mainloop::kM>, Int<Mainloop::kHeadDimV>>{});  // (mma, m, head_dim)
  }
};

}  // namespace flashtile
