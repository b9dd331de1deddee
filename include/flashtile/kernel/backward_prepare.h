// Before a backward kernel: what it needs of each row, the beginning of dQ, and the gradients of the sinks.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/launch.h"
#include "flashtile/mainloop/sum_of_dq.h"
#include "flashtile/math/softmax.h"
#include "flashtile/math/state.h"
#include "flashtile/order_tiles.h"
#include "flashtile/params.h"

namespace flashtile {

inline constexpr int kPrepareThreads = 256;

/// One thread block per tile of the workspace, see BackwardWorkspace.
template <class Row>
__global__ void __launch_bounds__(kPrepareThreads) backward_prepare(const __grid_constant__ BackwardParams params) {
  using Element = std::conditional_t<Row::kVariant.dtype == DType::kFloat16, cute::half_t, cute::bfloat16_t>;
  constexpr int kHeadDimV = Row::kVariant.head_dim_v;
  constexpr int kVector = 8;                                                // elements of a 16-byte load
  constexpr int kLanes = kHeadDimV <= 64 ? 8 : kHeadDimV <= 128 ? 16 : 32;  // of one row
  static_assert(kHeadDimV <= kLanes * kVector);
  const BackwardWorkspace workspace = params.workspace;
  BackwardParams::QueryTile tile;
  if (!params.find_query_tile(blockIdx.x, tile)) return;
  const Span queries = tile.sequence.q;
  const int column = threadIdx.x % kLanes * kVector;
  const auto origin = [&](const void* base, Strides const& strides) {
    return static_cast<const Element*>(base) + strides.at(tile.batch, queries.first) + tile.head * strides.head +
           column;
  };
  const Element* const out = origin(params.out, params.out_strides);
  const Element* const dout = origin(params.dout, params.dout_strides);

  constexpr int kRowsAtATime = kPrepareThreads / kLanes;
  static_assert(Row::kVariant.tile_m % kRowsAtATime == 0);
#pragma unroll 4  // loads of several rows are on their way together
  for (int first = 0; first < Row::kVariant.tile_m; first += kRowsAtATime) {
    const int row = first + threadIdx.x / kLanes;
    const int query = tile.m_block * Row::kVariant.tile_m + row;
    const bool exists = query < queries.used;
    float sum = 0;
    if (exists && column < params.head_dim_v) {
      const uint4 a = *reinterpret_cast<const uint4*>(out + query * params.out_strides.row);
      const uint4 b = *reinterpret_cast<const uint4*>(dout + query * params.dout_strides.row);
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i)
        sum += float(reinterpret_cast<const Element*>(&a)[i]) * float(reinterpret_cast<const Element*>(&b)[i]);
    }
    CUTE_UNROLL
    for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (threadIdx.x % kLanes == 0) {
      const std::int64_t index = params.lse_strides.at(tile.batch, tile.head, queries.first + query);
      const float lse = exists ? params.lse[index] : -kInfinity;
      const bool sees = lse != -kInfinity;
      workspace.lse_log2(params.memory)[tile.place * workspace.tile_m + row] = sees ? lse * kLog2e : kInfinity;
      workspace.delta(params.memory)[tile.place * workspace.tile_m + row] =
          sees ? sum - (params.dlse ? params.dlse[index] : 0.0f) : 0.0f;
    }
  }

  if (workspace.parts > 0 && blockIdx.x == 0 && threadIdx.x == 0) *params.taken = 0;
  if (params.dq == nullptr) return;
  constexpr bool kFirstStores = Row::kVariant.arch == Arch::kSm90;
  if (int(threadIdx.x) < workspace.parts) {
    const int first = tile.keys(params, Row::kVariant.tile_m, Row::kVariant.tile_n).visible.begin;
    workspace.state(params.memory)[tile.place * workspace.parts + threadIdx.x] = !params.deterministic
                                                                                     ? SumOfDq::kNothing
                                                                                 : kFirstStores ? ~first
                                                                                                : first;
  }
  if constexpr (!kFirstStores) {
    const int size = workspace.tile_m * workspace.head_dim;
    float4* const dq = reinterpret_cast<float4*>(workspace.dq(params.memory) + tile.place * size);
    for (int i = threadIdx.x; i < size / 4; i += kPrepareThreads) dq[i] = {};
  }
}

/// dsinks = −Σ weight of the sink · delta, over all rows of a head, one thread block to each: in the same order in
/// every run.
template <class Row>
__global__ void __launch_bounds__(kPrepareThreads) backward_sinks(const __grid_constant__ BackwardParams params) {
  const int head = blockIdx.x;
  const float sink_log2 = kLog2e * params.sinks[head];
  const int tile_m = Row::kVariant.tile_m;
  const std::int64_t rows = params.sequences.q.places(tile_m) * tile_m;
  double sum = 0;
  // By place, not as they are listed: of equally long sequences that may differ from run to run.
  for (std::int64_t row = threadIdx.x; row < rows; row += kPrepareThreads) {
    const int place = int(row / tile_m);
    const int batch = params.sequences.q.entry_of(place, tile_m);
    const Span span = params.sequences.q.at(batch);
    const int query = int(row - params.sequences.q.first_place(batch, span.first, tile_m) * std::int64_t(tile_m));
    if (query >= span.used) continue;
    const std::int64_t first =
        params.ragged_queries.given() ? params.workspace_tile(batch, head, span) : params.workspace_tile(batch, head);
    sum -= exp2f(sink_log2 - params.workspace.lse_log2(params.memory)[first * tile_m + query]) *
           params.workspace.delta(params.memory)[first * tile_m + query];
  }
  __shared__ double sums[kPrepareThreads];
  sums[threadIdx.x] = sum;
  for (int half = kPrepareThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) params.dsinks[head] = float(sums[0]);
}

template <class Row>
void launch_backward_prepare(BackwardPlan const& plan, BackwardParams const& params, Stream stream) {
  static KernelHandles prepare, sinks;
  const Device device = plan.problem.device;
  if (plan.problem.ragged) {
    const Band band = plan.problem.band;
    order_tiles(params.sequences,
                {RaggedOrder{params.ragged_queries, RaggedOrder::Of::kQueries, plan.variant.tile_m, band, params.heads},
                 RaggedOrder{params.ragged_keys, RaggedOrder::Of::kKeys, plan.variant.tile_n, band, params.heads_k,
                             plan.parts_of_sequence, plan.blocks_of_section}},
                device, stream);
  }
  launch(backward_prepare<Row>, prepare, device, {int(params.workspace.tiles), kPrepareThreads, 0}, params, stream);
  if (params.dsinks) launch(backward_sinks<Row>, sinks, device, {params.heads, kPrepareThreads, 0}, params, stream);
}

}  // namespace flashtile
