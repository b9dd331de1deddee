// Attention of one work item: one block of queries of one head walks over the visible tiles of keys. forward.cpp and
// kvcache.cpp say where its rows lie.
#pragma once

#include "dispatch.h"
#include "flashtile/math/softmax.h"
#include "flashtile/math/state.h"
#include "items.h"
#include "tiling.h"

namespace flashtile::cpu {

/// One thread's.
struct AttendMemory {
  ForwardBuffers buffers;
  TileBuffers tile;
};

AttendMemory take_attend_memory(Arena& arena, const Sizes& sizes, bool dropout);

/// All keys are seen: the sink joins, and what is left is a factor for each row of `out`. `lse` may be null.
void normalise(const ForwardBlock& block, float sink_log2, float* lse);

struct KeyRows {
  HeadRows k;
  HeadRows v;
};

/// Of `t` only what belongs to queries and heads is read. `rows` has queries(Range), the item's, and keys(Range), its
/// KeyRows.
template <class Rows>
void attend(const Problem& problem, const ForwardTensors& t, const Sizes& largest, const AttendMemory& memory,
            const Item& item, const Rows& rows) {
  const Kernels& kernel = kernels(problem.dtype);
  const Lengths lengths = item.rows.lengths();
  const Sizes sizes = fit(largest, lengths);
  const int batch = item.batch, head = item.head;
  const Span& q = item.rows.q;
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
      .q = rows.queries(queries),
      .out = head_rows(t.out, batch, head, q.first + queries.begin),
      .buffers = memory.buffers,
  };
  kernel.forward_begin(block);
  const TileRanges tiles = problem.band.tiles(queries, sizes.tile_n, lengths);
  for (int i = tiles.visible.begin; i < tiles.visible.end; ++i) {
    const Range keys = tile_range(i, sizes.tile_n, lengths.k);
    const Tile tile =
        make_tile(problem, sizes, {batch, head, lengths, queries, keys}, !tiles.interior.contains(i), memory.tile);
    const auto [k, v] = rows.keys(keys);
    kernel.forward_tile(block, tile, k, v);
  }
  const float sink = t.sinks.given() ? static_cast<const float*>(t.sinks.data)[head] : -kInfinity;
  normalise(block, sink * kLog2e, lse != nullptr ? lse + queries.begin : nullptr);
  kernel.forward_end(block);
}

}  // namespace flashtile::cpu
