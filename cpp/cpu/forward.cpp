// Forward: a work item is one block of queries of one head; its thread walks over the visible tiles of keys.
#include <algorithm>

#include "cpu.h"
#include "dispatch.h"
#include "flashtile/math/softmax.h"
#include "flashtile/math/state.h"
#include "items.h"
#include "parallel.h"
#include "tiling.h"

namespace flashtile::cpu {
namespace {

struct ThreadMemory {
  ForwardBuffers buffers;
  TileBuffers tile;
};

ThreadMemory divide(Arena& arena, const Sizes& s, bool dropout) {
  const std::int64_t m = s.tile_m, n = s.tile_n;
  const std::int64_t d = round_up(s.head_dim, kLanePadding), d_v = round_up(s.head_dim_v, kLanePadding);
  return {.buffers = {.queries = arena.take(m * d),
                      .queries_transposed = arena.take(d * m),
                      .keys = arena.take(n * d),
                      .values = arena.take(n * d_v),
                      .value_steps = arena.take(n * d_v),
                      .scores = arena.take(n * m),
                      .probabilities = arena.take(n * m),
                      .out = arena.take(m * d_v),
                      .reference_log2 = arena.take(m),
                      .sum = arena.take(m),
                      .rescale = arena.take(m),
                      .shield = arena.take(n * d_v)},
          .tile = take_tile_buffers(arena, s, dropout)};
}

std::int64_t thread_bytes(const Sizes& sizes, bool dropout) {
  Arena arena;
  divide(arena, sizes, dropout);
  return arena.bytes();
}

/// All keys are seen: the sink joins, and what is left is a factor for each row of `out`.
void normalise(const ForwardBlock& block, float sink_log2, float* lse) {
  const ForwardBuffers& rows = block.buffers;
  for (int i = 0; i < block.queries; ++i) {
    RowState state{rows.reference_log2[i], rows.sum[i]};
    const float factor = state.join(sink_log2);
    rows.rescale[i] = factor * state.normaliser();
    if (lse != nullptr) lse[i] = state.lse();
  }
}

void attend(const Problem& problem, const ForwardTensors& t, const Sizes& largest, const ThreadMemory& memory,
            const Item& item) {
  const Kernels& kernel = kernels(problem.dtype);
  const Sizes sizes = fit(largest, item.rows.lengths());
  const int batch = item.batch, head = item.head, head_k = head / problem.group();
  const Span &q = item.rows.q, &k = item.rows.k;
  // Under a causal mask the last block sees most keys: the longest first.
  const auto [queries, unused] = block_rows(item.blocks - 1 - item.block, largest.tile_m, q);
  float* const lse = t.lse.given() ? static_cast<float*>(t.lse.data) + first_lse(problem, q, batch, head) : nullptr;
  clear_rows(t.out, batch, head, {q.first + unused.begin, q.first + unused.end});
  if (lse != nullptr) std::fill(lse + unused.begin, lse + unused.end, -kInfinity);
  if (queries.empty()) return;
  const ForwardBlock block{
      .sizes = sizes,
      .scores = head_scores(problem, t.alibi_slopes, batch, head),
      .queries = queries.end - queries.begin,
      .q = head_rows(t.q, batch, head, q.first + queries.begin),
      .out = head_rows(t.out, batch, head, q.first + queries.begin),
      .buffers = memory.buffers,
  };
  kernel.forward_begin(block);
  const TileRanges tiles = problem.band.tiles(queries, sizes.tile_n, item.rows.lengths());
  for (int i = tiles.visible.begin; i < tiles.visible.end; ++i) {
    const Range keys = tile_range(i, sizes.tile_n, k.used);
    const TileRows rows{batch, head, item.rows.lengths(), queries, keys};
    const Tile tile = make_tile(problem, sizes, rows, !tiles.interior.contains(i), memory.tile);
    kernel.forward_tile(block, tile, head_rows(t.k, batch, head_k, k.first + keys.begin),
                        head_rows(t.v, batch, head_k, k.first + keys.begin));
  }
  const float sink = t.sinks.given() ? static_cast<const float*>(t.sinks.data)[head] : -kInfinity;
  normalise(block, sink * kLog2e, lse != nullptr ? lse + queries.begin : nullptr);
  kernel.forward_end(block);
}

}  // namespace

std::int64_t forward_workspace_bytes(const Problem& problem, const Variant& variant, int threads) {
  Arena table;
  table.take<Items::Entry>(Items::table_size(problem));
  return table.bytes() + threads * thread_bytes(tile_sizes(problem, variant), problem.dropout.active());
}

void run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace, Stream) {
  const Problem& problem = plan.problem;
  const Sizes sizes = tile_sizes(problem, plan.variant);
  const std::int64_t bytes = thread_bytes(sizes, problem.dropout.active());
  Arena table(workspace);
  const Items items(problem, entries_of(problem, &tensors), table.take<Items::Entry>(Items::table_size(problem)),
                    problem.heads_q, [&](const Sequence& rows) { return Spans::tiles(rows.q.size, sizes.tile_m); });
  parallel_for(plan.grid, items.count(), [&](int thread, std::int64_t item) {
    Arena arena(static_cast<std::byte*>(workspace) + table.bytes() + thread * bytes);
    attend(problem, tensors, sizes, divide(arena, sizes, problem.dropout.active()), items.at(item));
  });
}

}  // namespace flashtile::cpu
