// From raw scores to logits in the log2 domain, on a tile of S^T.
#pragma once

#include "flashtile/math/state.h"
#include "kernels.h"
#include "simd.h"

namespace flashtile::cpu {
namespace {

// Chains of exponentials that run side by side; with 16 registers there is room for two.
constexpr int kSoftmaxVectors = kRegisters == 32 ? 4 : 2;

/// Whether a logit is more than a positive factor times the raw score, see ScoreMap::order_preserving.
FLASHTILE_INLINE bool needs_map(const Scores& scores) {
  return scores.inner != 0 || scores.slope_log2 != 0 || !(scores.outer_log2 > 0);
}

/// |key − diagonal| of the register of queries from `query` on.
FLASHTILE_INLINE Vec distances(const Tile& tile, int key, int query) {
  return abs(__builtin_convertvector(tile.distance + key - query - iota(), Vec));
}

/// The lanes of the register from `query` on that lie in `range`.
FLASHTILE_INLINE IntVec lanes_in(Range range, int query) {
  const IntVec lane = iota() + query;
  return (lane >= range.begin) & (lane < range.end);
}

void map_scores(const Scores& scores, const Tile& tile, float* s, int stride) {
  for (int key = 0; key < tile.keys; ++key, s += stride) {
    for (int query = 0; query < tile.queries; query += kLanes) {
      Vec x = load(s + query);
      x = scores.outer_log2 * (scores.inner != 0 ? tanh(scores.inner * x) : x);
      if (scores.slope_log2 != 0) x -= scores.slope_log2 * distances(tile, key, query);
      store(s + query, x);
    }
  }
}

/// −inf where an edge tile hides the score.
void hide(const Tile& tile, float* s, int stride) {
  for (int key = 0; key < tile.keys; ++key, s += stride) {
    const Range visible = tile.visible.queries_of_key[key];
    for (int query = 0; query < tile.queries; query += kLanes) {
      if (visible.begin <= query && query + kLanes <= visible.end) continue;
      store(s + query, lanes_in(visible, query) ? load(s + query) : splat(-kInfinity));
    }
  }
}

}  // namespace
}  // namespace flashtile::cpu
