// The backward kernel of wide heads for Hopper. The two passes need nothing of each other, so they are one grid: first
// a thread block per block of keys, which forms dK and dV, then one per tile of queries, which forms dQ. No sum is
// shared between thread blocks: the results are the same in every run.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>

#include "flashtile/epilogue/gradient.h"
#include "flashtile/kernel/backward_prepare.h"
#include "flashtile/launch.h"
#include "flashtile/mainloop/backward_keys_sm90.h"
#include "flashtile/mainloop/backward_queries_sm90.h"
#include "flashtile/params.h"
#include "flashtile/tensor_map.h"

namespace flashtile {

inline constexpr int kRegistersOfTwoPass = 240;  // of a consumer's thread

template <class Mainloop, bool kRagged>
CUTE_DEVICE void backward_keys_sm90(BackwardTwoPassParams const& params, typename Mainloop::SharedStorage& shared) {
  using namespace cute;
  using Element = typename Mainloop::Element;
  BackwardParams const& backward = params.backward;
  typename Mainloop::Work work;
  if (!work.find(backward, blockIdx.x)) return;
  const int warpgroup = threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
  const auto store = [&](auto mma, auto& acc, float scale, void* gradient, Strides const& strides, int columns) {
    if (gradient == nullptr) return;
    store_gradient<Mainloop::kN, decltype(mma), kRagged>(
        acc, scale,
        GradientHead<Element>::of(gradient, strides, work.batch, work.kv_head, work.span_of_keys(backward), columns),
        work.n_block * Mainloop::kN, thread);
  };
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (thread == 0) typename Mainloop::Producer{params, shared}.run(work);
  } else if (warpgroup == 1) {
    cutlass::arch::warpgroup_reg_alloc<kRegistersOfTwoPass>();
    typename Mainloop::MmaV mma;
    Tensor tVrdV = partition_fragment_C(mma, Shape<Int<Mainloop::kN>, Int<Mainloop::kHeadDimV>>{});
    clear(tVrdV);
    typename Mainloop::Values{backward, shared, thread}.run(work, tVrdV);
    store(mma, tVrdV, backward.dropout.scale, backward.dv, backward.dv_strides, backward.head_dim_v);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kRegistersOfTwoPass>();
    typename Mainloop::MmaK mma;
    Tensor tKrdK = partition_fragment_C(mma, Shape<Int<Mainloop::kN>, Int<Mainloop::kHeadDim>>{});
    clear(tKrdK);
    typename Mainloop::Keys{backward, shared, thread}.run(work, tKrdK);
    store(mma, tKrdK, backward.scale, backward.dk, backward.dk_strides, backward.head_dim);
  }
}

template <class Mainloop, bool kRagged>
CUTE_DEVICE void backward_queries_sm90(BackwardTwoPassParams const& params, typename Mainloop::SharedStorage& shared) {
  using namespace cute;
  using Element = typename Mainloop::Element;
  BackwardParams const& backward = params.backward;
  typename Mainloop::Work work;
  if (!work.find(backward, blockIdx.x - params.key_blocks)) return;
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (threadIdx.x == 0) typename Mainloop::Producer{params, shared}.run(work);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kRegistersOfTwoPass>();
    const int thread = threadIdx.x - 128;
    typename Mainloop::MmaQ mma;
    Tensor tQrdQ = partition_fragment_C(mma, Shape<Int<Mainloop::kM>, Int<Mainloop::kHeadDim>>{});
    clear(tQrdQ);
    typename Mainloop::Consumer{backward, shared, thread}.run(work, tQrdQ);
    const BackwardParams::QueryTile& tile = work.tile;
    store_gradient<Mainloop::kM, decltype(mma), kRagged>(
        tQrdQ, backward.scale,
        GradientHead<Element>::of(backward.dq, backward.dq_strides, tile.batch, tile.head, tile.sequence.q,
                                  backward.head_dim),
        tile.m_block * Mainloop::kM, thread);
  }
}

template <class Row, bool kRagged>
__global__ void __launch_bounds__(Row::kVariant.threads(), 1)
    backward_two_pass_sm90(const __grid_constant__ BackwardTwoPassParams params) {
  using OfKeys = BackwardKeysSm90<Row::kVariant, kRagged>;
  using OfQueries = BackwardQueriesSm90<Row::kVariant, kRagged>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.k));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.v));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.dout));
  }
  const auto begin = [&](auto& shared) {
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
  };
  if (int(blockIdx.x) < params.key_blocks) {
    auto& shared = *reinterpret_cast<typename OfKeys::SharedStorage*>(shared_bytes);
    begin(shared);
    backward_keys_sm90<OfKeys, kRagged>(params, shared);
  } else {
    auto& shared = *reinterpret_cast<typename OfQueries::SharedStorage*>(shared_bytes);
    begin(shared);
    backward_queries_sm90<OfQueries, kRagged>(params, shared);
  }
}

template <class Row>
void launch_backward_two_pass_sm90(const BackwardPlan& plan, const BackwardTensors& tensors, void* memory,
                                   Stream stream) {
  using OfKeys = BackwardKeysSm90<Row::kVariant, true>;
  using OfQueries = BackwardQueriesSm90<Row::kVariant, true>;
  static_assert(Row::kVariant.warps == 12);
  static_assert(std::max(sizeof(typename OfKeys::SharedStorage), sizeof(typename OfQueries::SharedStorage)) <=
                backward_shared_memory(Row::kVariant));
  static KernelHandles dense, of_ragged;
  const bool ragged = plan.problem.ragged;
  const Device device = plan.problem.device;
  BackwardParams backward = BackwardParams::of(plan, tensors, memory);
  backward.deterministic = false;  // it always is: nobody adds to dQ
  const BackwardWorkspace& workspace = backward.workspace;
  constexpr int kRows = 64;
  const BackwardTwoPassParams params{
      .backward = backward,
      .q = head_tiles(tensors.forward.q, kRows, OfKeys::kColumns, ragged),
      .k = head_tiles(tensors.forward.k, kRows, OfKeys::kColumns, ragged),
      .v = head_tiles(tensors.forward.v, kRows, OfKeys::kColumns, ragged),
      .dout = head_tiles(tensors.dout, kRows, OfKeys::kColumns, ragged),
      .statistics = float_boxes(workspace.lse_log2(memory), 2, workspace.rows(), 2, kRows, device),
      .key_blocks = backward.dk || backward.dv ? static_cast<int>(plan.tiles - workspace.tiles) : 0,
  };
  const int query_tiles = static_cast<int>(workspace.tiles);
  launch_backward_prepare<Row>(plan, backward, stream);
  const LaunchShape shape = {params.key_blocks + (backward.dq ? query_tiles : 0), Row::kVariant.threads(),
                             plan.shared_memory};
  ragged ? launch(backward_two_pass_sm90<Row, true>, of_ragged, device, shape, params, stream)
         : launch(backward_two_pass_sm90<Row, false>, dense, device, shape, params, stream);
}

}  // namespace flashtile
