#include "flashtile/prepare_backward.h"

#include <cute/tensor.hpp>

#include "flashtile/backward_order.h"
#include "flashtile/cuda/constants.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/mainloop/sum_of_dq.h"
#include "flashtile/math/element.h"
#include "flashtile/math/softmax.h"
#include "flashtile/math/state.h"
#include "flashtile/scheduler/list_tiles.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads >= RaggedOrder::kClasses && kThreads >= kMostRowsOfBackwardTile);

struct PrepareParams {
  BackwardParams backward;
  RaggedOrder orders[2];
  int lists;            // 2 for a ragged batch, 0 for a dense one
  int tile_n;           // keys of the backward kernel's tiles
  bool sums_dq;         // blocks of keys add to dQ in the workspace
  int most_that_store;  // see BackwardPlan
};

/// Returns the entry of a slot, as Spans::entry_of does, by a whole warp. The lists of tiles cannot say it, as they are
/// only being written at this time.
__device__ int entry_of_place(Spans const& spans, int place, int tile) {
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

/// Finds the tile of queries at slot `index` of the workspace, by a whole warp; returns false if there is none.
__device__ bool query_tile_at(BackwardParams const& params, int index, BackwardParams::QueryTile& tile) {
  if (!params.ragged_queries.given()) return params.find_query_tile(unsigned(index), tile);
  const Spans& spans = params.sequences.q;
  const int tile_m = params.workspace.tile_m;
  const int head = index / params.m_blocks, place = index - head * params.m_blocks;
  const int batch = entry_of_place(spans, place, tile_m);
  const Sequence sequence = params.sequences.at(batch);
  tile = {batch, head, place - spans.first_place(batch, sequence.q.first, tile_m), sequence, index};
  return tile.m_block >= 0 && tile.m_block * tile_m < sequence.q.size;
}

constexpr int kVector = 8;  // elements of a 16-byte load

/// Forms Σ dO∘O of each row of a tile, in `products`. `kLanes` threads read a row of O and of dO, 8 elements each;
/// `out` and `dout` are where this thread's elements of the sequence's first row lie.
template <class Element, int kLanes>
__device__ __forceinline__ void multiply_rows(BackwardParams const& params, BackwardParams::QueryTile const& tile,
                                              const Element* out, const Element* dout, float* products) {
  constexpr int kRowsAtATime = kThreads / kLanes;
  constexpr int kTogether = kLanes == 16 ? 5 : 4;  // steps whose loads are in flight together: 5 make a tile of 80
  const int tile_m = params.workspace.tile_m;
  const Span queries = tile.sequence.q;
  const int lane = threadIdx.x % kLanes, column = lane * kVector;
#pragma unroll 1
  for (int first = threadIdx.x / kLanes; first < tile_m; first += kTogether * kRowsAtATime) {
    const int first_query = tile.m_block * tile_m + first;
    uint4 a[kTogether] = {}, b[kTogether] = {};
    if (column < params.head_dim_v) {
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int query = first_query + i * kRowsAtATime;
        if (first + i * kRowsAtATime >= tile_m || query >= queries.used) continue;
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
      if (lane == 0 && first + i * kRowsAtATime < tile_m) products[first + i * kRowsAtATime] = sum;
    }
  }
}

/// Writes the workspace's lse_log2 and delta of a row.
__device__ void write_row(BackwardParams const& params, std::int64_t row, FinishedRow finished, float delta) {
  BackwardWorkspace const& workspace = params.workspace;
  const float unit_log2 = params.scores.map.unit_log2;
  // Adding 0 turns a −0, which would say that the row is steep, into 0.
  float lse_log2 = finished.saw_nothing() ? kInfinity : finished.lse_log2(unit_log2) + 0.0f;
  if (finished.steep(unit_log2)) {
    lse_log2 = BackwardWorkspace::kSteepRow;
    workspace.steep_rows(params.memory)[row] = {finished.reference, quotient(finished.log2_sum, unit_log2)};
    *workspace.steep(params.memory) = params.mark;
  }
  workspace.lse_log2(params.memory)[row] = lse_log2;
  workspace.delta(params.memory)[row] = finished.saw_nothing() ? 0.0f : delta;
}

/// Returns whether so many blocks of keys see a tile of queries that it is to be cleared. All threads of a block call
/// it.
__device__ bool is_cleared(PrepareParams const& prepare, BackwardParams::QueryTile const& tile) {
  BackwardParams const& params = prepare.backward;
  if (prepare.most_that_store < 0) return true;
  if (!params.columns.given())
    return tile.keys(params, params.workspace.tile_m, prepare.tile_n).blocks() > prepare.most_that_store;
  const int blocks = Spans::tiles(tile.sequence.k.used, prepare.tile_n);
  if (blocks <= prepare.most_that_store) return false;
  const MaskWords& words = params.mask_tables.keys;
  const int mask = words.masks == 1 ? 0 : tile.head / params.group;
  // Tables that break the rules may speak of more blocks than there are words for.
  const int first_place = params.sequences.k.first_place(tile.batch, tile.sequence.k.first, prepare.tile_n);
  const int end = min(first_place + blocks, words.places);
  if (first_place < 0 || tile.m_block >= MaskWords::kBlocks * words.words) return false;
  int seen_by = 0;
  for (int first = first_place; first < end; first += kThreads) {
    const int place = first + int(threadIdx.x);
    seen_by += __syncthreads_count(place < end && words.visits(words.of_place(place, mask), tile.m_block));
  }
  return seen_by > prepare.most_that_store;
}

/// Makes a tile of dQ ready for blocks of keys to add to: its state (see SumOfDq), and zeros where all of them add.
__device__ void begin_dq(PrepareParams const& prepare, BackwardParams::QueryTile const& tile) {
  BackwardParams const& params = prepare.backward;
  BackwardWorkspace const& workspace = params.workspace;
  const bool first_stores = !is_cleared(prepare, tile);
  if (int(threadIdx.x) < workspace.parts) {
    int state = first_stores ? SumOfDq::kNothing : SumOfDq::kThere;
    if (params.deterministic) {
      const int first = params.columns.given() ? 0 : tile.keys(params, workspace.tile_m, prepare.tile_n).first();
      state = first_stores ? ~first : first;
    }
    workspace.state(params.memory)[tile.place * workspace.parts + threadIdx.x] = state;
  }
  if (first_stores) return;
  const int size = workspace.tile_m * workspace.head_dim;
  float4* const dq = reinterpret_cast<float4*>(workspace.dq(params.memory) + tile.place * size);
#pragma unroll 2  // more would be code to fetch
  for (int i = threadIdx.x; i < size / 4; i += kThreads) dq[i] = {};
}

/// Runs one thread block per tile of the workspace, see BackwardWorkspace; of a ragged batch, before those, one for
/// each list of tiles, by which the next kernel goes. A dense batch has a kernel without the code for lists, which
/// would have to be fetched around.
template <class Element, int kLanes, bool kRagged>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ PrepareParams prepare) {
  let_next_kernel_start();
  if (threadIdx.x / 32 == kThreads / 32 - 1) prefetch_constants(prepare);
  BackwardParams const& params = prepare.backward;
  const BackwardWorkspace workspace = params.workspace;
  const int tile_m = workspace.tile_m;
  const int index = int(blockIdx.x) - prepare.lists;
  if constexpr (kRagged) {
    if (index < 0) return list_tiles(params.sequences, prepare.orders[blockIdx.x]);
  } else {
    __builtin_assume(!params.ragged_queries.given());
  }
  if (workspace.counts() && index == 0 && threadIdx.x == 0) *params.taken = 0;
  BackwardParams::QueryTile tile;
  if (index >= workspace.tiles || !query_tile_at(params, index, tile)) return;

  const Span queries = tile.sequence.q;
  const auto elements = [&](const void* base, Strides const& strides) {
    return static_cast<const Element*>(base) + strides.at(tile.batch, queries.first) + tile.head * strides.head +
           threadIdx.x % kLanes * kVector;
  };
  const Element* const out = elements(params.out, params.out_strides);
  const Element* const dout = elements(params.dout, params.dout_strides);

  // Thread r reads and writes the numbers of row r, so that a warp's accesses coalesce. The loads start here and are
  // used after multiply_rows(), whose own loads take as long.
  const int own_query = tile.m_block * tile_m + int(threadIdx.x);
  const bool owns = int(threadIdx.x) < tile_m, counts = owns && own_query < queries.used;
  RowResults::Stored stored;
  float dlse = 0;
  if (counts) {
    const std::int64_t own = params.rows.strides.at(tile.batch, tile.head, queries.first + own_query);
    stored = params.rows.stored(own);
    if (params.dlse) dlse = params.dlse[own];
  }
  __shared__ float products[kMostRowsOfBackwardTile];
  multiply_rows<Element, kLanes>(params, tile, out, dout, products);
  __syncthreads();
  if (owns) {
    const FinishedRow finished = counts ? params.rows.finished(stored, params.scores.map.unit) : FinishedRow{};
    write_row(params, tile.place * tile_m + threadIdx.x, finished, products[threadIdx.x] - dlse);
  }
  if (prepare.sums_dq) begin_dq(prepare, tile);
}

/// Forms dsinks = −Σ weight of the sink · delta over all rows of a head, with one thread block for each head: the order
/// of the sum is the same in every run.
__global__ void __launch_bounds__(kThreads) sinks_kernel(const __grid_constant__ BackwardParams params) {
  let_next_kernel_start();
  await_kernel_before();
  const int head = blockIdx.x;
  const float sink = params.sinks[head], unit = params.scores.map.unit;
  const int tile_m = params.workspace.tile_m;
  const std::int64_t rows = params.sequences.q.places(tile_m) * tile_m;
  double sum = 0;
  // Rows are taken by slot, not in the order of the list, which may differ from run to run for equally long sequences.
  for (std::int64_t row = threadIdx.x; row < rows; row += kThreads) {
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
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) params.dsinks[head] = float(sums[0]);
}

template <DType kDType>
void launch_prepare(PrepareParams const& params, Device device, Stream stream) {
  using Element = ElementOf<kDType>;
  static KernelHandles dense[3], ragged[3];
  const int head_dim_v = params.backward.head_dim_v;
  const int blocks = params.lists + std::max(int(params.backward.workspace.tiles), 1);
  const auto launch_kernel = [&](auto lanes, int handles) {
    params.lists > 0
        ? launch(prepare_kernel<Element, lanes, true>, ragged[handles], device, {blocks, kThreads, 0}, params, stream)
        : launch(prepare_kernel<Element, lanes, false>, dense[handles], device, {blocks, kThreads, 0}, params, stream);
  };
  if (head_dim_v <= 64)
    launch_kernel(std::integral_constant<int, 8>{}, 0);
  else if (head_dim_v <= 128)
    launch_kernel(std::integral_constant<int, 16>{}, 1);
  else
    launch_kernel(std::integral_constant<int, 32>{}, 2);
}

}  // namespace

void prepare_backward(BackwardPlan const& plan, BackwardParams const& params, Stream stream) {
  static KernelHandles sinks;
  const Problem& problem = plan.problem;
  const Variant& v = plan.variant;
  const PrepareParams prepare{
      .backward = params,
      .orders = {{params.ragged_queries, RaggedOrder::Of::kQueries, Divisor(v.tile_m), problem.mask(),
                  Divisor(params.heads)},
                 {params.ragged_keys, RaggedOrder::Of::kKeys, Divisor(v.tile_n), problem.mask(),
                  Divisor(params.heads_k), plan.parts_of_sequence, plan.blocks_of_section}},
      .lists = problem.ragged ? 2 : 0,
      .tile_n = v.tile_n,
      .sums_dq = params.dq != nullptr && !dq_is_whole(plan),
      .most_that_store = plan.most_that_store,
  };
  const bool is_half = v.dtype == DType::kFloat16;
  (is_half ? launch_prepare<DType::kFloat16> : launch_prepare<DType::kBFloat16>)(prepare, problem.device, stream);
  const LaunchShape shape{params.heads, kThreads, 0, v.arch == Arch::kSm90};
  if (params.dsinks) launch(sinks_kernel, sinks, problem.device, shape, params, stream);
}

}  // namespace flashtile
