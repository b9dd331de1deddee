#include "flashtile/join_parts.h"

#include <algorithm>
#include <cute/tensor.hpp>
#include <type_traits>

#include "flashtile/cuda/constants.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/epilogue/partial.h"
#include "flashtile/math/element.h"
#include "flashtile/math/part.h"
#include "flashtile/math/round.h"

namespace flashtile {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 4;                   // columns that a thread has of a row
constexpr int kFewParts = 4, kManyParts = 8;  // that are loaded together: by the most that a tile has

struct JoinParams {
  ForwardParams forward;
  int tile_m;
  Divisor chunks_of_row, blocks_of_tile;  // a chunk is kColumns columns of one row, a thread's work
  // These are of fixed parts: how many keys one has, and which rows of the cache count, where queries are dense.
  int keys_of_part = 0;
  CachedRows rows;
};

/// Finds the tile of rows at a place, as ForwardParts has them.
__device__ void find_tile(ForwardParams const& params, int place, TileCoord& tile, Span& queries) {
  const ForwardParts& parts = params.parts;
  const Spans& spans = params.sequences.q;
  tile.head = place / parts.m_blocks;
  const int within = place - tile.head * parts.m_blocks;
  if (spans.ragged()) {
    tile.batch = spans.entry_of(within, parts.queries);
    queries = spans.at(tile.batch);
    tile.m_block = within - spans.first_place(tile.batch, queries.first, parts.queries);
  } else {
    tile.batch = tile.head / parts.heads;
    tile.head -= tile.batch * parts.heads;
    queries = spans.at(tile.batch);
    tile.m_block = within;
  }
}

/// Returns which parts of its keys a tile has: all, or of fixed parts those with a key that one of its rows sees.
__device__ Range parts_of(JoinParams const& params, TileCoord tile, Span queries) {
  ForwardParams const& forward = params.forward;
  if (params.keys_of_part == 0) return {0, forward.parts.splits.value};
  const int keys =
      params.rows.held != nullptr ? params.rows.at(tile.batch).count() : forward.sequences.k.at(tile.batch).used;
  const Range of_tile = forward.scores.packing.queries(tile.m_block * params.tile_m, params.tile_m, queries.used);
  return forward.scores.mask.walk(of_tile, params.keys_of_part, {queries.used, keys}).visible;
}

/// Joins the parts of some rows of one tile. It loads kAtOnce parts together, and the next when it has joined them: to
/// load them meanwhile made most calls slower (docs/performance.md).
template <class Element, int kAtOnce>
__global__ void __launch_bounds__(kThreads) join_parts_kernel(const __grid_constant__ JoinParams params) {
  ForwardParams const& forward = params.forward;
  const ForwardParts& parts = forward.parts;
  if (threadIdx.x / 32 == 0) prefetch_constants(params);
  const int place = params.blocks_of_tile.quotient(blockIdx.x);
  const int chunk = params.blocks_of_tile.remainder(blockIdx.x) * kThreads + int(threadIdx.x);
  const int row = params.chunks_of_row.quotient(chunk), column = params.chunks_of_row.remainder(chunk) * kColumns;
  TileCoord tile;
  Span queries;
  find_tile(forward, place, tile, queries);
  const HeadPacking packing = forward.scores.packing;
  const int query = packing.query(tile.m_block * params.tile_m, row);
  const bool there =
      row < params.tile_m && tile.m_block >= 0 && has_query(packing, tile.m_block * params.tile_m, row, queries);
  const bool counts = there && query < queries.used;
  const Range joined = counts ? parts_of(params, tile, queries) : Range{};
  // All that was read so far are tables, of callers or of kernels before the forward. That one lets this kernel start
  // when it has tiles, for which it has waited for these kernels. So nothing but the parts may be missing.
  await_kernel_before();
  if (!there) return;

  const std::int64_t first = std::int64_t(place) * parts.splits.value * params.tile_m + row;
  const float unit = forward.scores.map.unit, unit_log2 = forward.scores.map.unit_log2;
  Part sum;
  CUTE_NO_UNROLL
  for (int n = joined.begin; n < joined.end; n += kAtOnce) {
    Part some[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (n + i >= joined.end) continue;  // a part of nothing changes nothing
      const std::int64_t at = first + std::int64_t(n + i) * params.tile_m;
      some[i] = {*reinterpret_cast<const float4*>(parts.out + at * forward.head_dim_v + column), parts.state[at]};
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) sum.join(some[i], unit_log2);
  }
  const int head = packing.first_head(tile.head) + packing.head(row);
  const bool sinks = forward.sinks != nullptr && counts;
  const RowTotal total = sum.state.total(sinks ? forward.sinks[head] : -kInfinity, unit);
  sum.scale(total.normaliser);
  Element* const to = static_cast<Element*>(forward.out) + forward.out_strides.at(tile.batch, queries.first + query) +
                      head * forward.out_strides.head + column;
  // A product may be −0, and with fixed parts a result that is not joined here has none.
  *reinterpret_cast<uint2*>(to) = {round_pair<Element>(sum.o.x + 0.0f, sum.o.y + 0.0f),
                                   round_pair<Element>(sum.o.z + 0.0f, sum.o.w + 0.0f)};
  if (column == 0 && forward.rows.wanted())
    forward.rows.store(forward.rows.strides.at(tile.batch, head, queries.first + query), total.finished(), unit);
}

/// Returns how many rows of a tile may have queries. All of a ragged batch may be one sequence's.
int rows_of_tile(const ForwardPlan& plan) {
  const int of_warp = plan.packing.queries_of_warp, queries = plan.problem.seqlen_q;
  const std::int64_t rows =
      std::int64_t{queries / of_warp} * HeadPacking::kRows + queries % of_warp * plan.packing.heads;
  return static_cast<int>(std::min<std::int64_t>(rows, plan.variant.tile_m));
}

void join(const ForwardPlan& plan, const ForwardParams& params, int keys_of_part, const CachedRows& cached,
          Stream stream) {
  static KernelHandles few[2], many[2];
  const int tile_m = plan.variant.tile_m, chunks_of_row = plan.problem.head_dim_v / kColumns;
  const int rows = rows_of_tile(plan);
  const int blocks_of_tile = (rows * chunks_of_row + kThreads - 1) / kThreads;
  const int tiles = static_cast<int>(plan.tiles / plan.splits);
  const JoinParams of_join{params, tile_m, Divisor(chunks_of_row), Divisor(blocks_of_tile), keys_of_part, cached};
  const LaunchShape shape{tiles * blocks_of_tile, kThreads, 0, true};
  const Device device = plan.problem.device;
  const auto start = [&](auto at_once, KernelHandles(&handles)[2]) {
    plan.variant.dtype == DType::kFloat16
        ? launch(join_parts_kernel<ElementOf<DType::kFloat16>, at_once>, handles[0], device, shape, of_join, stream)
        : launch(join_parts_kernel<ElementOf<DType::kBFloat16>, at_once>, handles[1], device, shape, of_join, stream);
  };
  if (params.parts.splits.value <= kFewParts)
    start(std::integral_constant<int, kFewParts>{}, few);
  else
    start(std::integral_constant<int, kManyParts>{}, many);
}

}  // namespace

void join_parts(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  join(plan, params, 0, {}, stream);
}

void join_fixed_parts(const ForwardPlan& plan, const ForwardParams& params, const FixedParts& parts,
                      const CachedRows& rows, Stream stream) {
  join(plan, params, parts.keys, params.sequences.q.ragged() ? CachedRows{} : rows, stream);
}

}  // namespace flashtile
