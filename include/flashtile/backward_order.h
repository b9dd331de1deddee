// This file has what select and Hopper's backward kernels both say of the order of a backward's work.
#pragma once

#include <cstdint>

#include "flashtile/plan.h"

namespace flashtile {

/// Returns whether `grid` persistent thread blocks of the kernel of one pass take blocks of keys in rounds of alternate
/// direction, in `parts` parts each, where a head has `blocks`. Otherwise each takes the next that no other has taken.
/// Rounds are balanced if all blocks have equal work, or under a mask if they are of whole heads. Where dQ is summed in
/// order, a block may only wait for one that has been taken. Not every row has a kernel for rounds.
inline bool go_in_rounds(const Problem& p, const Variant& v, int blocks, int parts, int grid) {
  return v.may_loop() && !p.ragged && !p.deterministic && !p.column_masked() &&
         (p.band == Band::full() || grid % (std::int64_t{blocks} * parts) == 0);
}

/// Returns whether, in a kernel of one pass, the only block of keys of each head forms dQ of all queries: then nothing
/// is to be summed. How long a ragged sequence is, the host does not know.
inline bool dq_is_whole(const BackwardPlan& plan) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  if (!v.may_loop() || p.ragged || p.column_masked() || p.seqlen_k == 0 || p.seqlen_k > v.tile_n) return false;
  if (plan.grid < plan.tiles && !go_in_rounds(p, v, 1, plan.parts, plan.grid)) return false;
  const BlockWalk tiles = p.mask().transposed().walk({0, p.seqlen_k}, v.tile_m, p.lengths().transposed());
  return tiles.visible == Range{0, Spans::tiles(p.seqlen_q, v.tile_m)};
}

/// In the pass that forms dK and dV, of two, a block of keys meets tiles of so many queries.
inline constexpr int kQueriesOfPass = 64;

/// Returns how many queries a step of a block of keys has.
constexpr int queries_of_step(const Variant& v) {
  return v.two_passes() ? kQueriesOfPass : v.tile_m;
}

/// Returns how long a step of the other pass takes, which forms dQ: a tile of queries meets a block of keys. It has
/// three matmuls, where the step of a block of keys, which it is measured by, has four.
constexpr double step_of_queries(const Variant& v) {
  return 0.75 * v.tile_m / kQueriesOfPass;
}

/// Returns whether tiles of queries come before blocks of keys, of which `parts` thread blocks share each: whichever
/// takes longer, so that what comes last is short. How long a ragged sequence is, the host does not know.
inline bool queries_come_first(const Problem& p, const Variant& v, int parts) {
  const double of_keys = 1.0 * p.group() * ((p.seqlen_q + kQueriesOfPass - 1) / kQueriesOfPass) / parts;
  return !p.ragged && step_of_queries(v) * ((p.seqlen_k + v.tile_n - 1) / v.tile_n) > of_keys;
}

/// Returns of how many query heads the tiles are interleaved, where blocks of keys are of `heads` KV heads: under a
/// mask of all that share those.
inline int query_heads_at_once(const Problem& p, int heads) {
  return p.band == Band::full() && !p.column_masked() ? 1 : heads * p.group();
}

}  // namespace flashtile
