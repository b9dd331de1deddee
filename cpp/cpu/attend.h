// This file computes the attention of one work item: a block of rows, which are queries of one head or of several
// packed heads, walks over the visible tiles of keys. forward.cpp and kvcache.cpp say where its rows lie.
#pragma once

#include "dispatch.h"
#include "flashtile/math/softmax.h"
#include "flashtile/math/state.h"
#include "items.h"
#include "tiling.h"

namespace flashtile::cpu {

/// This is the memory of one thread.
struct AttendMemory {
  ForwardBuffers buffers;
  TileBuffers tile;
  std::int64_t* query_starts;  // (M)
  std::int64_t* out_starts;    // (M)
};

AttendMemory take_attend_memory(Arena& arena, const Sizes& sizes, bool dropout);

/// Writes the rows that do not count: out = 0, lse = −inf.
void clear_unused(const Problem& problem, const ForwardTensors& t, const Item& item, const PackedHeads& heads,
                  Range rows);

/// Finishes the softmax once all keys are seen: the sink joins the sum, and buffers.rescale becomes the factor that
/// still has to multiply each row of `out`.
void normalise(const Problem& problem, const ForwardTensors& t, const Item& item, const PackedHeads& heads, Range rows,
               const ForwardBuffers& buffers);

struct KeyRows {
  HeadRows k;
  HeadRows v;
};

/// Computes one item. Of `t` it reads only what belongs to queries and heads. `source` has queries(Range), those rows
/// of the item, keys(Range), its KeyRows, and columns(Range), what a column mask has of them: see TileRows. Packed
/// heads have no slopes, no dropout and no column mask.
template <class Source>
void attend(const Problem& problem, const ForwardTensors& t, const Sizes& largest, const AttendMemory& memory,
            const Item& item, const PackedHeads& heads, const Source& source) {
  const Kernels& kernel = kernels(problem);
  const Lengths lengths = item.rows.lengths();
  const Span q = heads.rows(item.rows.q);
  const Sizes sizes = fit(largest, {q.used, lengths.k});
  // Under a causal mask the last block sees most keys, so it is taken first: longest first.
  const auto [rows, unused] = block_rows(item.blocks - 1 - item.block, largest.tile_m, q);
  clear_unused(problem, t, item, heads, unused);
  if (rows.empty()) return;
  const ForwardBlock block{
      .sizes = sizes,
      .scores = head_scores(problem, t.alibi_slopes, item.batch, heads.first),
      .queries = rows.end - rows.begin,
      .q = source.queries(rows),
      .out = packed_rows(t.out, item.batch, heads, item.rows.q.first, rows, memory.out_starts),
      .buffers = memory.buffers,
  };
  kernel.forward_begin(block);
  const BlockWalk walk = problem.mask().walk(heads.queries(rows), sizes.tile_n, lengths);
  for (int i = walk.first(); i < walk.end(); i = walk.next(i)) {
    const Range keys = tile_range(i, sizes.tile_n, lengths.k);
    const TileRows of_tile{item.batch, heads, lengths, rows, keys, source.columns(keys)};
    const BlockKind kind = of_tile.kind(walk.kind(i), problem.band);
    if (kind == BlockKind::kSkip) continue;
    const Tile tile = make_tile(problem, sizes, of_tile, kind, memory.tile);
    const auto [k, v] = source.keys(keys);
    kernel.forward_tile(block, tile, k, v);
  }
  normalise(problem, t, item, heads, rows, memory.buffers);
  kernel.forward_end(block);
}

}  // namespace flashtile::cpu
