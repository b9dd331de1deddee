// These are the backward kernels for Hopper, of heads up to 128: the first has thread blocks for blocks of keys; the
// second, where the first does not form dQ as a whole, one for each tile of dQ, and others for parts of dK and dV.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>

#include "flashtile/backward_order.h"
#include "flashtile/cuda/constants.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/epilogue/gradient.h"
#include "flashtile/epilogue/partial_gradient.h"
#include "flashtile/join_gradients.h"
#include "flashtile/load/tensor_map.h"
#include "flashtile/mainloop/backward_one_pass_sm90.h"
#include "flashtile/mainloop/sum_of_dq.h"
#include "flashtile/params.h"
#include "flashtile/prepare_backward.h"

namespace flashtile {

template <class Row, Takes kTakes, Contributes kContributes = Contributes::kPart>
__global__ void __launch_bounds__(Row::kVariant.threads(), 1)
    backward_one_pass_sm90(const __grid_constant__ BackwardOnePassParams params) {
  using namespace cute;
  using Mainloop = BackwardOnePassSm90<Row::kVariant, kTakes, kContributes>;
  using Element = typename Mainloop::Element;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Mainloop::SharedStorage*>(shared_bytes);
  const int warp = threadIdx.x / 32;
  if (warp == 3) prefetch_constants(params);
  if (threadIdx.x == 128) shared.init_barriers();  // a consumer, which has to wait for tiles later
  if (threadIdx.x == 64) {
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.q));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.k));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.v));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.dout));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.statistics));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.dq));
  }
  const OnePassBlocksSm90<Mainloop> blocks(params, shared);
  __syncthreads();  // all threads wait for the barriers' initialisation

  // While rows are being prepared, the producer has the first tiles of Q, K, V and dO loaded and the consumers begin
  // with S. Each role waits for that kernel where it first needs what it writes.
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Mainloop::kProducerRegisters>();
    if (threadIdx.x == 0) {
      OnePassProducerSm90<Mainloop>{params, shared}.run(blocks);
      return;
    }
    await_kernel_before();
    if (threadIdx.x % 32 == 0 && warp <= Mainloop::kWarpgroups) {
      OnePassWriterSm90<Mainloop>{params, shared, warp - 1}.run(blocks);
    } else if constexpr (Mainloop::kRagged) {
      if (threadIdx.x % 32 == 0) OnePassSchedulerSm90<Mainloop>{params, shared}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Mainloop::kRegisters>();
    const int thread = threadIdx.x - 128;
    BackwardParams const& backward = params.backward;
    const auto store = [&](typename Mainloop::Work const& work, auto& tKrdK, auto& tVrdV) {
      let_next_kernel_start();
      const auto scale_dv = [&](auto& acc) {
        if constexpr (Mainloop::kKnowsDropout) scale_gradient(acc, backward.dropout.scale);
      };
      const auto scale_dk = [&](auto& acc) { scale_gradient(acc, backward.scale); };
      const auto store = [&](auto& acc, auto const& scale, void* gradient, Strides const& strides, float* partial,
                             int columns, CUtensorMap const& map, Element* staging) {
        if (gradient == nullptr) return;
        if (partial != nullptr) [[unlikely]]
          return store_partial<Mainloop::kN, Mainloop::kHeadDim, typename Mainloop::MmaKV>(
              acc, partial, work.place, work.span_of_keys(backward).used - work.n_block * Mainloop::kN, columns,
              thread);
        scale(acc);
        const int first_row = work.n_block * Mainloop::kN;
        if constexpr (!Mainloop::kLoops) {
          stage_and_store_gradient<typename Mainloop::SmemLayoutGradient, Mainloop::kColumns>(
              map, acc, staging, first_row, work.kv_head, work.batch, thread);
        } else {
          const auto head = GradientHead<Element>::of(gradient, strides, work.batch, work.kv_head,
                                                      work.span_of_keys(backward), columns);
          store_gradient<Mainloop::kN, typename Mainloop::MmaKV, Mainloop::kRagged>(acc, head, first_row, thread);
        }
      };
      store(tVrdV, scale_dv, backward.dv, backward.dv_strides, backward.partial_dv, backward.head_dim_v, params.dv,
            shared.v);
      store(tKrdK, scale_dk, backward.dk, backward.dk_strides, backward.partial_dk, backward.head_dim, params.dk,
            shared.k);
    };
    const auto stage_dq = [&](auto& acc, Element* staging) {
      using Layout = typename Mainloop::SmemLayoutStaged;
      const int first = thread % 128 / 32 * kRowsOfWarp, lane = thread % 32;
      scale_gradient(acc, backward.scale);
      if constexpr (Mainloop::kTurned) {
        stage_columns<Layout>(rows_and_columns(acc), staging, first, lane);
      } else {
        constexpr int kPerBox = Mainloop::kColumnsOfStaged;
        stage_rows<Layout, kPerBox>(rows_and_columns(acc), staging + first * kPerBox, lane);
      }
    };
    OnePassConsumerSm90<Mainloop>{params, shared, thread}.run(blocks, store, stage_dq);
    if (!Mainloop::kLoops) tma_store_wait<0>();  // shared memory must outlive TMA's reads of it
  }
}

inline constexpr int kFinishThreads = 256;

struct BackwardFinishParams {
  BackwardParams backward;
  GradientJoin join;
};

/// Scales and rounds dQ, one thread block per tile of the workspace. There a tile has the order of MmaQ's accumulators;
/// it goes through shared memory to get into rows. Thread blocks before these join parts of dK and dV.
template <class Row>
__global__ void __launch_bounds__(kFinishThreads)
    backward_finish_sm90(const __grid_constant__ BackwardFinishParams both) {
  using namespace cute;
  using Mainloop = BackwardOnePassSm90<Row::kVariant, Takes::kBlock>;
  using Element = typename Mainloop::Element;
  static_assert(kFinishThreads == 128 * Mainloop::kWarpgroups && kFinishThreads == kJoinThreads);
  BackwardParams const& params = both.backward;
  constexpr int kPitch = Mainloop::kHeadDim + 8;  // padded so that no two lanes meet in a bank
  __shared__ alignas(16) Element rows[Mainloop::kM * kPitch];
  const int thread = threadIdx.x;
  if (thread / 32 == 0) prefetch_constants(both);
  const int index = int(blockIdx.x) - both.join.grid;
  if (index < 0) return join_gradients<Element>(params, both.join, blockIdx.x);
  if (params.ragged_queries.given()) await_kernel_before();  // the list of tiles is of a kernel before
  BackwardParams::QueryTile tile;
  const bool there = params.find_query_tile(unsigned(index), tile);
  await_kernel_before();
  if (!there) return;
  const bool stored = SumOfDq(params, tile.place, thread / 128).stored();
  const float4* part = reinterpret_cast<const float4*>(params.workspace.dq(params.memory) +
                                                       (tile.place * Mainloop::kWarpgroups + thread / 128) *
                                                           std::int64_t(Mainloop::kPartOfQ)) +
                       thread % 128;
  const auto shape = take<0, 2>(typename Mainloop::ShapeQ{});
  typename Mainloop::MmaQ mma;
  Tensor tQrdQ = partition_fragment_C(mma, shape);  // (mma, m, head_dim), transposed if kTurned
  Tensor coord = mma.get_slice(thread).partition_C(make_identity_tensor(shape));
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); i += 4) {
    const float4 four = part[i / 4 * 128];
    tQrdQ(i) = four.x;
    tQrdQ(i + 1) = four.y;
    tQrdQ(i + 2) = four.z;
    tQrdQ(i + 3) = four.w;
  }
  if (!stored) clear(tQrdQ);  // what was loaded, without waiting for the state, means nothing
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); ++i) {
    const int row = Mainloop::kTurned ? get<1>(coord(i)) : get<0>(coord(i));
    const int column = Mainloop::kTurned ? get<0>(coord(i)) : get<1>(coord(i));
    rows[row * kPitch + column] = static_cast<Element>(params.scale * tQrdQ(i));
  }
  __syncthreads();  // all threads wait for the rows of the tile

  constexpr int kVector = 8;  // elements of a 16-byte store
  constexpr int kLanes = Mainloop::kHeadDim / kVector;
  constexpr int kRowsAtATime = kFinishThreads / kLanes;  // a few threads are left where lanes do not divide them
  const int column = thread % kLanes * kVector;
  if (column >= params.head_dim || thread >= kRowsAtATime * kLanes) return;
  const Span span = tile.sequence.q;
  const int first_row = tile.m_block * Mainloop::kM;
  Element* const origin = static_cast<Element*>(params.dq) + params.dq_strides.at(tile.batch, span.first + first_row) +
                          tile.head * params.dq_strides.head + column;
  CUTE_UNROLL
  for (int row = thread / kLanes; row < Mainloop::kM; row += kRowsAtATime)
    if (first_row + row < span.size)
      *reinterpret_cast<uint4*>(origin + row * params.dq_strides.row) =
          *reinterpret_cast<const uint4*>(rows + row * kPitch + column);
}

template <class Row>
void launch_backward_one_pass_sm90(const BackwardPlan& plan, const BackwardTensors& tensors, void* memory,
                                   Stream stream) {
  using Mainloop = BackwardOnePassSm90<Row::kVariant, Takes::kBlock>;
  static_assert(sizeof(typename Mainloop::SharedStorage) <= backward_shared_memory(Row::kVariant));
  static KernelHandles one, in_order, several, one_whole, several_whole, of_next, masked, last;
  const Device device = plan.problem.device;
  const BackwardParams backward = BackwardParams::of(plan, tensors, memory);
  const BackwardWorkspace& workspace = backward.workspace;
  const bool ragged = plan.problem.ragged;
  const std::int64_t parts = workspace.tiles * Mainloop::kWarpgroups;
  constexpr int kRowsOfPart = Mainloop::kRowsOfPart;
  const bool loops = plan.grid < plan.tiles;
  const bool next =
      ragged || (loops && !go_in_rounds(plan.problem, plan.variant, backward.n_blocks, plan.parts, plan.grid));
  const bool whole = dq_is_whole(plan);
  const auto rows_of_warp = [&](const TensorView& gradient) {
    return ragged || loops ? CUtensorMap{} : head_tiles(gradient, kRowsOfWarp, Mainloop::kColumns, false);
  };
  const BackwardOnePassParams params{
      .backward = backward,
      .q = head_tiles(tensors.forward.q, Mainloop::kM, Mainloop::kColumns, ragged),
      .k = head_tiles(tensors.forward.k, Mainloop::kN, Mainloop::kColumnsOfK, ragged),
      .v = head_tiles(tensors.forward.v, Mainloop::kN, Mainloop::kColumns, ragged),
      .dout = head_tiles(tensors.dout, Mainloop::kM, Mainloop::kColumns, ragged),
      .statistics = float_boxes(workspace.lse_log2(memory), 2, workspace.rows(), 2, Mainloop::kM, device),
      .dq = whole ? head_tiles(tensors.dq, Mainloop::kStagedRows, Mainloop::kColumnsOfStaged, false)
                  : float_boxes(workspace.dq(memory), parts * kRowsOfPart, Mainloop::kColumnsOfPart, kRowsOfPart,
                                Mainloop::kColumnsOfPart, device),
      .dk = rows_of_warp(tensors.dk),
      .dv = rows_of_warp(tensors.dv),
      .blocks = static_cast<int>(plan.tiles),
  };
  const int tiles = static_cast<int>(workspace.tiles);
  if (plan.problem.column_masked())
    find_mask_tables(backward.mask_tables, plan.variant, backward.columns, plan.problem, backward.sequences, {},
                     stream);
  prepare_backward(plan, backward, stream);
  const auto launch_main = [&](auto kernel, KernelHandles& handles) {
    launch(kernel, handles, device, {plan.grid, Row::kVariant.threads(), plan.shared_memory, true}, params, stream);
  };
  const auto launch_dense = [&](auto takes, auto contributes, KernelHandles& one, KernelHandles& several) {
    if constexpr (Row::kVariant.may_loop()) {
      if (loops) return launch_main(backward_one_pass_sm90<Row, Takes::kBlocks, contributes>, several);
    }
    launch_main(backward_one_pass_sm90<Row, takes, contributes>, one);
  };
  constexpr std::integral_constant<Takes, Takes::kBlock> kBlock;
  constexpr std::integral_constant<Takes, Takes::kBlockInOrder> kBlockInOrder;
  if (plan.problem.column_masked()) {
    if constexpr (Row::kVariant.may_mask_backward())
      launch_main(backward_one_pass_sm90<Row, Takes::kNextMasked>, masked);
  } else if (next) {
    launch_main(backward_one_pass_sm90<Row, Takes::kNext>, of_next);
  } else if (whole) {  // dK and dV have the same order as where dQ is not
    if constexpr (Row::kVariant.may_loop())
      launch_dense(kBlockInOrder, std::integral_constant<Contributes, Contributes::kWhole>{}, one_whole, several_whole);
  } else if (plan.problem.deterministic) {
    launch_main(backward_one_pass_sm90<Row, Takes::kBlockInOrder>, in_order);
  } else {
    launch_dense(kBlock, std::integral_constant<Contributes, Contributes::kPart>{}, one, several);
  }
  if (backward.dq == nullptr || whole) return join_gradients(plan, backward, stream);
  const BackwardFinishParams both{backward, GradientJoin::of(plan, backward)};
  launch(backward_finish_sm90<Row>, last, device, {both.join.grid + tiles, kFinishThreads, 0, true}, both, stream);
}

}  // namespace flashtile
