// Before a backward kernel: what it needs of each row, lists of ragged tiles, the beginning of dQ, gradients of sinks.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/launch.h"
#include "flashtile/mainloop/sum_of_dq.h"
#include "flashtile/math/softmax.h"
#include "flashtile/math/state.h"
#include "flashtile/params.h"
#include "flashtile/scheduler/list_tiles.h"

namespace flashtile {

inline constexpr int kPrepareThreads = 256;

struct BackwardPrepareParams {
  BackwardParams backward;
  RaggedOrder orders[2];
  int lists;  // 2, of a dense batch 0
};

/// The entry of a place, as Spans::entry_of has it, by a whole warp: the lists are only being written at this time.
__device__ inline int entry_of_place(Spans const& spans, int place, int tile) {
  int low = 0, high = spans.entries();
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, entry = low + int(threadIdx.x % 32) * step;
    const bool before =
        entry == low || (entry < high && spans.first_place(entry, spans.at(entry).first, tile) <= place);
    low += step * (__popc(__ballot_sync(0xffffffff, before)) - 1);
    high = min(high, low + step);
  }
  return low;
}

/// The tile of queries at place `index` of the workspace, by a whole warp; false if there is none.
template <int kTileM>
__device__ bool query_tile_at(BackwardParams const& params, int index, BackwardParams::QueryTile& tile) {
  if (!params.ragged_queries.given()) return params.find_query_tile(unsigned(index), tile);
  const Spans& spans = params.sequences.q;
  const int head = index / params.m_blocks, place = index - head * params.m_blocks;
  const int batch = entry_of_place(spans, place, kTileM);
  const Sequence sequence = params.sequences.at(batch);
  tile = {batch, head, place - spans.first_place(batch, sequence.q.first, kTileM), sequence, index};
  return tile.m_block >= 0 && tile.m_block * kTileM < sequence.q.size;
}

/// One thread block per tile of the workspace, see BackwardWorkspace; of a ragged batch, before those, one for each
/// list of tiles, which the next kernel goes by.
template <class Row>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_prepare(const __grid_constant__ BackwardPrepareParams prepare) {
  using Element = std::conditional_t<Row::kVariant.dtype == DType::kFloat16, cute::half_t, cute::bfloat16_t>;
  constexpr int kHeadDimV = Row::kVariant.head_dim_v;
  constexpr int kVector = 8;                                                // elements of a 16-byte load
  constexpr int kLanes = kHeadDimV <= 64 ? 8 : kHeadDimV <= 128 ? 16 : 32;  // of one row
  static_assert(kHeadDimV <= kLanes * kVector && kPrepareThreads >= RaggedOrder::kClasses);
  BackwardParams const& params = prepare.backward;
  const BackwardWorkspace workspace = params.workspace;
  const int index = int(blockIdx.x) - prepare.lists;
  if (index < 0) return list_tiles(params.sequences, prepare.orders[blockIdx.x]);
  if (workspace.counts() && index == 0 && threadIdx.x == 0) *params.taken = 0;
  BackwardParams::QueryTile tile;
  if (index >= workspace.tiles || !query_tile_at<Row::kVariant.tile_m>(params, index, tile)) return;
  const Span queries = tile.sequence.q;
  const int lane = threadIdx.x % kLanes, column = lane * kVector;
  const auto origin = [&](const void* base, Strides const& strides) {
    return static_cast<const Element*>(base) + strides.at(tile.batch, queries.first) + tile.head * strides.head +
           column;
  };
  const Element* const out = origin(params.out, params.out_strides);
  const Element* const dout = origin(params.dout, params.dout_strides);

  constexpr int kTileM = Row::kVariant.tile_m;
  constexpr int kRowsAtATime = kPrepareThreads / kLanes;
  constexpr int kSteps = kTileM / kRowsAtATime;
  constexpr int kTogether = kSteps % 4 == 0 ? 4 : kSteps;  // steps whose loads are on their way together
  static_assert(kTileM % kRowsAtATime == 0 && kTileM <= kPrepareThreads);
  // The numbers of row r are read and written by thread r, so that neighbours in memory are neighbours in a warp. Their
  // loads start here and are used behind the loop, whose own loads take as long.
  const int own_query = tile.m_block * kTileM + int(threadIdx.x);
  const bool owns = int(threadIdx.x) < kTileM, counts = owns && own_query < queries.used;
  RowResults::Stored stored;
  float dlse = 0;
  if (counts) {
    const std::int64_t own = params.rows.strides.at(tile.batch, tile.head, queries.first + own_query);
    stored = params.rows.stored(own);
    if (params.dlse) dlse = params.dlse[own];
  }
  __shared__ float products[kTileM];  // Σ dO∘O of each row
#pragma unroll 1
  for (int first = threadIdx.x / kLanes; first < kTileM; first += kTogether * kRowsAtATime) {
    const int first_query = tile.m_block * kTileM + first;
    uint4 a[kTogether] = {}, b[kTogether] = {};
    if (column < params.head_dim_v) {
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int query = first_query + i * kRowsAtATime;
        if (query >= queries.used) continue;
        a[i] = *reinterpret_cast<const uint4*>(out + query * params.out_strides.row);
        b[i] = *reinterpret_cast<const uint4*>(dout + query * params.dout_strides.row);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      float sum = 0;
      CUTE_UNROLL
      for (int j = 0; j < kVector; ++j)
        sum += float(reinterpret_cast<const Element*>(&a[i])[j]) * float(reinterpret_cast<const Element*>(&b[i])[j]);
      CUTE_UNROLL
      for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
      if (lane == 0) products[first + i * kRowsAtATime] = sum;
    }
  }
  __syncthreads();
  if (owns) {
    const std::int64_t row = tile.place * kTileM + threadIdx.x;
    const float unit_log2 = params.score_map.unit_log2;
    const FinishedRow finished = counts ? params.rows.finished(stored, params.score_map.unit) : FinishedRow{};
    float lse_log2 = finished.saw_nothing() ? kInfinity : finished.lse_log2(unit_log2) + 0.0f;  // −0 becomes 0
    if (finished.steep(unit_log2)) {
      lse_log2 = BackwardWorkspace::kSteepRow;
      workspace.steep_rows(params.memory)[row] = {finished.reference, quotient(finished.log2_sum, unit_log2)};
      *workspace.steep(params.memory) = params.mark;
    }
    workspace.lse_log2(params.memory)[row] = lse_log2;
    workspace.delta(params.memory)[row] = finished.saw_nothing() ? 0.0f : products[threadIdx.x] - dlse;
  }

  if (params.dq == nullptr) return;
  constexpr bool kFirstStores = Row::kVariant.arch == Arch::kSm90;  // the first to add to dQ: see SumOfDq
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
  const float sink = params.sinks[head], unit = params.score_map.unit;
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
    const FinishedRow finished = params.rows.load(params.rows.strides.at(batch, head, span.first + query), unit);
    if (finished.saw_nothing()) continue;
    sum -= exp2f(fminf(finished.above_lse_log2(sink, unit), 0.0f)) *
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
  const Band band = plan.problem.band;
  const BackwardPrepareParams before{
      .backward = params,
      .orders = {{params.ragged_queries, RaggedOrder::Of::kQueries, Divisor(plan.variant.tile_m), band,
                  Divisor(params.heads)},
                 {params.ragged_keys, RaggedOrder::Of::kKeys, Divisor(plan.variant.tile_n), band,
                  Divisor(params.heads_k), plan.parts_of_sequence, plan.blocks_of_section}},
      .lists = plan.problem.ragged ? 2 : 0,
  };
  const int blocks = before.lists + std::max(int(params.workspace.tiles), 1);
  launch(backward_prepare<Row>, prepare, device, {blocks, kPrepareThreads, 0}, before, stream);
  if (params.dsinks) launch(backward_sinks<Row>, sinks, device, {params.heads, kPrepareThreads, 0}, params, stream);
}

}  // namespace flashtile
