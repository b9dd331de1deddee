// Forward: a work item is one block of queries of one head; its thread walks over the visible tiles of keys.
#include <algorithm>

#include "cpu.h"
#include "dispatch.h"
#include "flashtile/math/softmax.h"
#include "flashtile/math/state.h"
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

void attend(const Problem& problem, const ForwardTensors& t, const Sizes& sizes, const ThreadMemory& memory, int batch,
            int head, int block_index) {
  const Kernels& kernel = kernels(problem.dtype);
  const int head_k = head / problem.group();
  const Range queries = tile_range(block_index, sizes.tile_m, problem.seqlen_q);
  const std::int64_t first_row = (std::int64_t{batch} * problem.heads_q + head) * problem.seqlen_q + queries.begin;
  const ForwardBlock block{
      .sizes = sizes,
      .scores = head_scores(problem, t.alibi_slopes, batch, head),
      .queries = queries.end - queries.begin,
      .q = head_rows(t.q, batch, head, queries.begin),
      .out = head_rows(t.out, batch, head, queries.begin),
      .buffers = memory.buffers,
  };
  kernel.forward_begin(block);
  const TileRanges tiles = problem.band.tiles(queries, sizes.tile_n, problem.lengths());
  for (int i = tiles.visible.begin; i < tiles.visible.end; ++i) {
    const Range keys = tile_range(i, sizes.tile_n, problem.seqlen_k);
    const TileRows rows{batch, head, queries, keys};
    const Tile tile = make_tile(problem, sizes, rows, !tiles.interior.contains(i), memory.tile);
    kernel.forward_tile(block, tile, head_rows(t.k, batch, head_k, keys.begin),
                        head_rows(t.v, batch, head_k, keys.begin));
  }
  const float sink = t.sinks.given() ? static_cast<const float*>(t.sinks.data)[head] : -kInfinity;
  normalise(block, sink * kLog2e, t.lse.given() ? static_cast<float*>(t.lse.data) + first_row : nullptr);
  kernel.forward_end(block);
}

}  // namespace

std::int64_t forward_workspace_bytes(const Problem& problem, const Variant& variant, int threads) {
  return threads * thread_bytes(tile_sizes(problem, variant), problem.dropout.active());
}

void run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace, Stream) {
  const Problem& problem = plan.problem;
  const Sizes sizes = tile_sizes(problem, plan.variant);
  const std::int64_t bytes = thread_bytes(sizes, problem.dropout.active());
  const int blocks = (problem.seqlen_q + sizes.tile_m - 1) / sizes.tile_m;
  const std::int64_t items = std::int64_t{problem.batch} * problem.heads_q * blocks;
  parallel_for(plan.grid, items, [&](int thread, std::int64_t item) {
    Arena arena(static_cast<std::byte*>(workspace) + thread * bytes);
    const ThreadMemory memory = divide(arena, sizes, problem.dropout.active());
    const int head = static_cast<int>(item / blocks % problem.heads_q);
    const int batch = static_cast<int>(item / blocks / problem.heads_q);
    // Under a causal mask the last block sees most keys: the longest first.
    const int block = blocks - 1 - static_cast<int>(item % blocks);
    attend(problem, tensors, sizes, memory, batch, head, block);
  });
}

}  // namespace flashtile::cpu
