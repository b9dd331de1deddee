// This file says which blocks each part of a ragged sequence has (see RaggedPart), and how much work that is.
#pragma once

#include "flashtile/scheduler/ragged.h"
#include "flashtile/scheduler/sections.h"

namespace flashtile {

/// Returns the `part`-th of the parts of a sequence's blocks, the last of which has the most work, or else the first.
__device__ inline Range blocks_of_part(int blocks, int part, int parts, bool last_first) {
  const Range ranks = ranks_of_part(blocks, part, parts);
  return last_first ? Range{blocks - ranks.end, blocks - ranks.begin} : ranks;
}

/// Returns how many rows of the other side a block sees: keys of queries, or queries of keys.
__device__ inline int length_of(RaggedOrder const& order, Sequence const& sequence, int block) {
  const bool of_keys = order.of == RaggedOrder::Of::kKeys;
  const Lengths lengths = of_keys ? sequence.lengths().transposed() : sequence.lengths();
  const Mask mask = of_keys ? order.mask.transposed() : order.mask;
  const Range rows = {block * order.rows.value, min((block + 1) * order.rows.value, lengths.q)};
  return rows.empty() ? 0 : mask.columns(rows.end - 1, lengths).end - mask.columns(rows.begin, lengths).begin;
}

/// Returns whether an entry of a table is one that check would let pass, could the host read it.
__device__ inline bool is_legal(Spans const& spans, int b) {
  const int begin = spans.begins[b];
  return (b > 0 || begin == 0) && begin <= (b < spans.batch ? spans.begins[b + 1] : spans.size);
}

/// Returns how many heads of a sequence of `blocks` blocks make a section (see RaggedPart).
__device__ inline int heads_at_once(RaggedOrder const& order, int blocks) {
  const int heads = order.heads.value;
  // Sections have as even a number of heads as can be.
  return Spans::tiles(heads, Spans::tiles(heads, max(order.blocks_of_section / blocks, 1)));
}

}  // namespace flashtile
