// The backward kernel of wide heads for Hopper. The two passes need nothing of each other, so they are one grid: first
// a thread block per block of keys, which forms dK and dV, then one per tile of queries, which forms dQ. No sum is
// shared between thread blocks: the results are the same in every run.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>

#include "flashtile/epilogue/direct.h"
#include "flashtile/kernel/backward_prepare.h"
#include "flashtile/launch.h"
#include "flashtile/mainloop/backward_keys_sm90.h"
#include "flashtile/mainloop/backward_queries_sm90.h"
#include "flashtile/params.h"
#include "flashtile/tensor_map.h"

namespace flashtile {

inline constexpr int kRegistersOfTwoPass = 240;  // of a consumer's thread

/// Consumers: scales and rounds the accumulators of a (rows, head_dim) tile of `Mma`, and stores the rows that exist.
template <class Element, class Mma, class Accumulator>
CUTE_DEVICE void store_gradient(Accumulator& acc, int tile_rows, float scale, Element* head, std::int64_t row_stride,
                                int first_row, int rows, int columns, int thread) {
  using namespace cute;
  constexpr int kColumns = size<1>(typename Mma::AtomShape_MNK{});
  Tensor coord = rows_and_columns(
      Mma{}.get_slice(thread).partition_C(make_identity_tensor(make_shape(tile_rows, Int<kColumns>{}))));
  Tensor tile = rows_and_columns(acc);  // (row, head_dim)
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) acc(i) *= scale;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(tile); ++r) {
    const int row = first_row + get<0>(coord(r, 0));
    store_row(tile, r, head + row * row_stride, row < rows ? columns : 0);
  }
}

template <class Mainloop>
CUTE_DEVICE void backward_keys_sm90(BackwardTwoPassParams const& params, typename Mainloop::SharedStorage& shared) {
  using namespace cute;
  using Element = typename Mainloop::Element;
  BackwardParams const& backward = params.backward;
  const typename Mainloop::Work work(backward, blockIdx.x);
  const int warpgroup = threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
  const auto store = [&](auto mma, auto& acc, float scale, void* gradient, Strides const& strides, int columns) {
    if (gradient == nullptr) return;
    Element* const head = static_cast<Element*>(gradient) + work.batch * strides.batch + work.kv_head * strides.head;
    store_gradient<Element, decltype(mma)>(acc, Mainloop::kN, scale, head, strides.row, work.n_block * Mainloop::kN,
                                           backward.lengths.k, columns, thread);
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
    store(mma, tVrdV, 1.0f, backward.dv, backward.dv_strides, backward.head_dim_v);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kRegistersOfTwoPass>();
    typename Mainloop::MmaK mma;
    Tensor tKrdK = partition_fragment_C(mma, Shape<Int<Mainloop::kN>, Int<Mainloop::kHeadDim>>{});
    clear(tKrdK);
    typename Mainloop::Keys{backward, shared, thread}.run(work, tKrdK);
    store(mma, tKrdK, backward.scale, backward.dk, backward.dk_strides, backward.head_dim);
  }
}

template <class Mainloop>
CUTE_DEVICE void backward_queries_sm90(BackwardTwoPassParams const& params, typename Mainloop::SharedStorage& shared) {
  using namespace cute;
  using Element = typename Mainloop::Element;
  BackwardParams const& backward = params.backward;
  const typename Mainloop::Work work(backward, blockIdx.x - params.key_blocks);
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
    const TileCoord tile = work.tile;
    Element* const head = static_cast<Element*>(backward.dq) + tile.batch * backward.dq_strides.batch +
                          tile.head * backward.dq_strides.head;
    store_gradient<Element, decltype(mma)>(tQrdQ, Mainloop::kM, backward.scale, head, backward.dq_strides.row,
                                           tile.m_block * Mainloop::kM, backward.lengths.q, backward.head_dim, thread);
  }
}

template <class Row>
__global__ void __launch_bounds__(Row::kVariant.threads(), 1)
    backward_two_pass_sm90(const __grid_constant__ BackwardTwoPassParams params) {
  using OfKeys = BackwardKeysSm90<Row::kVariant>;
  using OfQueries = BackwardQueriesSm90<Row::kVariant>;
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
    backward_keys_sm90<OfKeys>(params, shared);
  } else {
    auto& shared = *reinterpret_cast<typename OfQueries::SharedStorage*>(shared_bytes);
    begin(shared);
    backward_queries_sm90<OfQueries>(params, shared);
  }
}

template <class Row>
void launch_backward_two_pass_sm90(const BackwardPlan& plan, const BackwardTensors& tensors, void* memory,
                                   Stream stream) {
  using OfKeys = BackwardKeysSm90<Row::kVariant>;
  using OfQueries = BackwardQueriesSm90<Row::kVariant>;
  static_assert(Row::kVariant.warps == 12);
  static_assert(std::max(sizeof(typename OfKeys::SharedStorage), sizeof(typename OfQueries::SharedStorage)) <=
                backward_shared_memory(Row::kVariant));
  static KernelHandles prepare, main;
  const Device device = plan.problem.device;
  const BackwardParams backward = BackwardParams::of(plan, tensors, memory);
  const BackwardWorkspace& workspace = backward.workspace;
  constexpr int kRows = 64;
  const BackwardTwoPassParams params{
      .backward = backward,
      .q = head_tiles(tensors.forward.q, kRows, OfKeys::kColumns),
      .k = head_tiles(tensors.forward.k, kRows, OfKeys::kColumns),
      .v = head_tiles(tensors.forward.v, kRows, OfKeys::kColumns),
      .dout = head_tiles(tensors.dout, kRows, OfKeys::kColumns),
      .statistics = float_boxes(workspace.lse_log2(memory), 2, workspace.rows(), 2, kRows, device),
      .key_blocks = backward.dk || backward.dv ? static_cast<int>(plan.tiles - workspace.tiles) : 0,
  };
  const int query_tiles = static_cast<int>(workspace.tiles);
  launch(backward_prepare<Row>, prepare, device, {query_tiles, kPrepareThreads, 0}, backward, stream);
  launch(backward_two_pass_sm90<Row>, main, device,
         {params.key_blocks + (backward.dq ? query_tiles : 0), Row::kVariant.threads(), plan.shared_memory}, params,
         stream);
}

}  // namespace flashtile
