// These are the backward kernels for Ampere and later: one thread block per block of keys, then one per tile of dQ.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/launch.h"
#include "flashtile/epilogue/partial_gradient.h"
#include "flashtile/epilogue/tile.h"
#include "flashtile/join_gradients.h"
#include "flashtile/mainloop/backward_sm80.h"
#include "flashtile/params.h"
#include "flashtile/prepare_backward.h"

namespace flashtile {

template <class Row>
__global__ void __launch_bounds__(Row::kVariant.threads())
    backward_sm80(const __grid_constant__ BackwardParams params) {
  using namespace cute;
  using Mainloop = BackwardMainloopSm80<Row::kVariant>;
  using Element = typename Mainloop::Element;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Mainloop::SharedStorage*>(shared_bytes);
  typename Mainloop::Work work;
  if (params.ragged_keys.given()) await_kernel_before();  // the list of blocks is of a kernel before
  if (!work.find(params, blockIdx.x)) return await_kernel_before();

  const auto shape_of_tile = Shape<Int<Mainloop::kN>, Int<Mainloop::kHeadDim>>{};
  Tensor gradient = partition_fragment_C(typename Mainloop::Mma{}, shape_of_tile);  // (mma, key, head_dim)
  clear(gradient);
  const Mainloop mainloop(params, shared, work);
  mainloop.run(gradient);
  let_next_kernel_start();

  const bool weighs = mainloop.weighs();
  const Span keys = work.sequence.k;
  const int key = work.n_block * Mainloop::kN;
  void* to = weighs ? params.dv : params.dk;
  const int columns = weighs ? params.head_dim_v : params.head_dim;
  if (params.parts.value > 1) {
    if (to != nullptr)
      store_partial<Mainloop::kN, Mainloop::kHeadDim, typename Mainloop::Mma>(
          gradient, weighs ? params.partial_dv : params.partial_dk, work.place, keys.used - key, columns,
          mainloop.thread);
    return;
  }

  // Each role stores its own gradient; both call store_tile together, whose barriers are those of all threads.
  const float scale = weighs ? params.dropout.scale : params.scale;
  CUTE_UNROLL
  for (int i = 0; i < size(gradient); ++i) gradient(i) *= scale;
  Strides const& strides = weighs ? params.dv_strides : params.dk_strides;
  using Layout = typename Mainloop::template SmemLayout<Mainloop::kN, Mainloop::kHeadDim>;
  Element* origin = static_cast<Element*>(to);
  if (origin) origin += strides.at(work.batch, keys.first + key) + work.kv_head * strides.head;
  store_tile<typename Mainloop::Mma, typename Mainloop::Load>(
      gradient, Mainloop::template tile<Layout>(weighs ? shared.v : shared.k), origin, strides.row,
      origin ? keys.size - key : 0, columns, mainloop.thread);
}

/// Scales and rounds dQ, one thread block per tile of the workspace.
template <class Row>
__global__ void __launch_bounds__(Row::kVariant.threads())
    backward_finish_sm80(const __grid_constant__ BackwardParams params) {
  using namespace cute;
  using Mainloop = BackwardMainloopSm80<Row::kVariant>;
  using Element = typename Mainloop::Element;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  if (params.ragged_queries.given()) await_kernel_before();  // the list of tiles is of a kernel before
  BackwardParams::QueryTile tile;
  const bool there = params.find_query_tile(blockIdx.x, tile);
  await_kernel_before();
  if (!there) return;

  Tensor tQrdQ = partition_fragment_C(typename Mainloop::MmaQ{},
                                      Shape<Int<Mainloop::kM>, Int<Mainloop::kHeadDim>>{});  // (mma, m, head_dim)
  const float* dq = Mainloop::dq_of_thread(params, tile.place, threadIdx.x);
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); ++i) tQrdQ(i) = params.scale * dq[i * Mainloop::kThreads];
  Strides const& strides = params.dq_strides;
  const Span queries = tile.sequence.q;
  const int row = tile.m_block * Mainloop::kM;
  using Layout = typename Mainloop::template SmemLayout<Mainloop::kM, Mainloop::kHeadDim>;
  store_tile<typename Mainloop::MmaQ, typename Mainloop::StoreQ>(
      tQrdQ, Mainloop::template tile<Layout>(reinterpret_cast<Element*>(shared_bytes)),
      static_cast<Element*>(params.dq) + strides.at(tile.batch, queries.first + row) + tile.head * strides.head,
      strides.row, queries.size - row, params.head_dim, threadIdx.x);
}

/// Returns whether the code that a GPU runs of a row's kernels was compiled for Hopper, so that it can wait for the
/// kernel before. Rows of backward.def that are marked `also for Hopper` are compiled for both; others are not.
template <class Row>
bool can_start_early(Device device) {
  enum Answer : char { kUnknown, kNo, kYes };
  static std::array<std::atomic<Answer>, kMaxDevices> answers{};
  std::atomic<Answer>& answer = answers[device.index];
  if (answer.load(std::memory_order_relaxed) == kUnknown) {
    cudaFuncAttributes attributes;
    throw_on_error(cudaFuncGetAttributes(&attributes, backward_sm80<Row>), "attributes of a kernel");
    answer.store(attributes.ptxVersion >= 90 ? kYes : kNo, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == kYes;
}

template <class Row>
void launch_backward_sm80(const BackwardPlan& plan, const BackwardTensors& tensors, void* memory, Stream stream) {
  using Mainloop = BackwardMainloopSm80<Row::kVariant>;
  static_assert(sizeof(typename Mainloop::SharedStorage) == backward_shared_memory(Row::kVariant));
  static KernelHandles main, finish;
  const BackwardParams params = BackwardParams::of(plan, tensors, memory);
  const Device device = plan.problem.device;
  const int tiles = static_cast<int>(params.workspace.tiles);
  const int threads = Mainloop::kThreads;
  const bool early = can_start_early<Row>(device);
  if (plan.problem.column_masked())
    find_mask_tables(params.mask_tables, plan.variant, params.columns, plan.problem, params.sequences, {}, stream);
  prepare_backward(plan, params, stream);
  launch(backward_sm80<Row>, main, device, {plan.grid, threads, plan.shared_memory, early}, params, stream);
  join_gradients(plan, params, stream);
  if (params.dq)
    launch(backward_finish_sm80<Row>, finish, device,
           {tiles, threads, int(sizeof(typename Mainloop::Element)) * Mainloop::kM * Mainloop::kHeadDim, early}, params,
           stream);
}

}  // namespace flashtile
