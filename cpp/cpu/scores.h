// This file turns raw scores into scores, on a tile of S^T.
#pragma once

#include "flashtile/math/softmax.h"
#include "kernels.h"
#include "simd.h"

namespace flashtile::cpu {
namespace {

// This many chains of exponentials run side by side; with 16 registers there is room for two.
constexpr int kSoftmaxVectors = kRegisters == 32 ? 4 : 2;

/// Returns |key − diagonal| of the register of queries from `query` on.
FLASHTILE_INLINE Vec distances(const Tile& tile, int key, int query) {
  return abs(__builtin_convertvector(tile.distance + key - query - iota(), Vec));
}

/// Returns the lanes of the register from `query` on that lie in `range`.
FLASHTILE_INLINE IntVec lanes_in(Range range, int query) {
  const IntVec lane = iota() + query;
  return (lane >= range.begin) & (lane < range.end);
}

/// Returns the lanes, of queries from `query` on, that a column mask hides from a key.
FLASHTILE_INLINE IntVec hidden_lanes(const Visible& visible, int key, int query) {
  const HiddenRows& hidden = visible.hidden[key];
  return lanes_in(hidden.first, visible.first_query + query) | lanes_in(hidden.second, visible.first_query + query);
}

/// These two apply ScoreMap to a register, in steps: a backward takes the softcap's slope from what the first returns.
FLASHTILE_INLINE Vec capped(const ScoreMap& map, Vec raw) {
  return map.capped ? tanh(map.inner * raw) : raw;
}
FLASHTILE_INLINE Vec stretched(const Scores& scores, const Tile& tile, Vec x, int key, int query) {
  if (!scores.map.stretched) return x;
  x = scores.map.outer * x;
  return scores.slope == 0 ? x : x - scores.slope * distances(tile, key, query);
}

void map_scores(const Scores& scores, const Tile& tile, float* s, int stride) {
  for (int key = 0; key < tile.keys; ++key, s += stride) {
    for (int query = 0; query < tile.queries; query += kLanes) {
      const Vec x = capped(scores.map, load(s + query));
      store(s + query, stretched(scores, tile, x, key, query));
    }
  }
}

/// Sets scores to −inf where an edge tile hides them.
void hide(const Tile& tile, float* s, int stride) {
  for (int key = 0; key < tile.keys; ++key, s += stride) {
    const Range visible = tile.visible.queries_of_key[key];
    for (int query = 0; query < tile.queries; query += kLanes) {
      if (visible.begin <= query && query + kLanes <= visible.end) continue;
      store(s + query, lanes_in(visible, query) ? load(s + query) : splat(-kInfinity));
    }
    if (tile.visible.hidden == nullptr) continue;
    for (int query = 0; query < tile.queries; query += kLanes)
      store(s + query, hidden_lanes(tile.visible, key, query) ? splat(-kInfinity) : load(s + query));
  }
}

}  // namespace
}  // namespace flashtile::cpu
