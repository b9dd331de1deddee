// This file is the backward of attention on one tile. P is recomputed from Q, K and the statistics of the rows:
//
//   dV += P^T·dO     dP = dO·V^T     dS = P∘(dP − delta)∘(softcap's slope)     dK += dS^T·Q     dQ += dS·K
//
// With dropout, whose factors are Z, dV takes P∘Z for P and dS takes dP∘Z for dP. The accumulators hold gradients with
// respect to scale·Q·K^T; the caller multiplies dQ and dK with the scale.
#pragma once

#include "flashtile/math/state.h"
#include "pack.h"
#include "scores.h"

namespace flashtile::cpu {
namespace {

template <class T>
void load_queries(const Sizes& sizes, const BackwardBuffers& to, int queries, HeadRows q, HeadRows dout) {
  constexpr Product kProduct = kProductOf<T>;
  const auto load_side = [&](HeadRows source, int width, float* rows, float* transposed, float* steps) {
    const int stride = summed_stride<kProduct>(width);
    // The three copies of a few rows are made while these are in the nearest cache. Floats have only two, and their
    // backward at head dimension 128 took 1 % longer that way (EPYC with AVX-512, one thread, 1,024 tokens).
    const int count = kProduct == Product::kPairs ? kLanePadding : sizes.tile_m;
    for (int row = 0; row < sizes.tile_m; row += count) {
      float* const at = rows + row * stride;
      load_rows<T>(at, source, queries, width, {row, row + count});
      transpose_words(transposed + row, sizes.tile_m, at, stride, count, stride);
      steps_of<kProduct>(steps + row / 2 * column_stride(width), at, count, width);
    }
  };
  load_side(q, sizes.head_dim, to.queries, to.queries_transposed, to.query_steps);
  load_side(dout, sizes.head_dim_v, to.dout, to.dout_transposed, to.dout_steps);
}

template <class T>
void load_keys(const Sizes& sizes, const BackwardBuffers& to, int keys, HeadRows k, HeadRows v) {
  constexpr Product kProduct = kProductOf<T>;
  const int padded_keys = round_up(keys, kKeyPadding<kProduct>);
  load_rows<T>(to.keys, k, keys, sizes.head_dim, {0, padded_keys});
  load_rows<T>(to.values, v, keys, sizes.head_dim_v, {0, padded_keys});
  steps_of<kProduct>(to.key_steps, to.keys, padded_keys, sizes.head_dim);
}

bool has_steep_rows(const BackwardTile& t) {
  for (int query = 0; query < t.tile.queries; query += kLanes) {
    if (any(abs(load(t.reference + query) * t.scores.map.unit_log2) >= kSteep)) return true;
  }
  return false;
}

struct Gradient {
  Vec p;  // P, or with dropout P∘Z
  Vec ds;
};

/// Returns P and dS of one register of queries. Where kPlain is false, scores are mapped or rows are steep (see
/// math/state.h): there no weight exceeds 1, however Q·K is rounded this time.
template <bool kPlain>
FLASHTILE_INLINE Gradient score_gradient(const BackwardTile& t, int key, int query) {
  const Range* const queries = t.tile.visible.queries_of_key;
  if (key >= t.tile.keys || query >= t.tile.queries) return Gradient{};  // scores may be unwritten there
  if (queries != nullptr && (queries[key].end <= query || query + kLanes <= queries[key].begin)) return Gradient{};
  const std::int64_t at = static_cast<std::int64_t>(key) * t.sizes.tile_m + query;
  Vec x = load(t.buffers.scores + at);
  Vec slope = splat(1.0f);
  if constexpr (!kPlain) {
    x = capped(t.scores.map, x);
    if (t.scores.map.capped) slope = 1.0f - x * x;
    x = stretched(t.scores, t.tile, x, key, query);
  }
  x = (x - load(t.reference + query)) * t.scores.map.unit_log2 - load(t.log2_sum + query);
  if constexpr (!kPlain) x = min_or_second(splat(0.0f), x);
  Vec p = exp2(x);
  const Vec kept = t.tile.dropout == nullptr ? splat(1.0f) : load(t.tile.dropout + at);
  Vec ds = p * (kept * load(t.buffers.dprobabilities + at) - load(t.delta + query));
  p *= kept;
  if constexpr (!kPlain) ds *= slope;
  if (queries == nullptr) return {p, ds};
  IntVec seen = lanes_in(queries[key], query);
  if (t.tile.visible.hidden != nullptr) seen &= ~hidden_lanes(t.tile.visible, key, query);
  return {seen ? p : Vec{}, seen ? ds : Vec{}};
}

/// Writes P^T and dS^T of the tile, each in the orders in which the matmuls read it, two keys × two registers at a
/// time.
template <Product kProduct, bool kPlain>
void score_gradients(const BackwardTile& t) {
  const BackwardBuffers& to = t.buffers;
  const int stride = t.sizes.tile_m;
  for (int key = 0; key < round_up(t.tile.keys, kKeyPadding<kProduct>); key += 2) {
    for (int query = 0; query < t.tile.queries; query += 2 * kLanes) {
      Gradient g[2][2];
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
          g[i][j] = score_gradient<kPlain>(t, key + i, query + j * kLanes);
        }
      }
      for (int i = 0; i < 2; ++i) {
        if constexpr (kProduct == Product::kPairs) {
          const std::int64_t at = (static_cast<std::int64_t>(key + i) * stride + query) / 2;
          store(to.probabilities + at, narrow(g[i][0].p, g[i][1].p));
          store(to.dscores + at, narrow(g[i][0].ds, g[i][1].ds));
          const std::int64_t step_at = static_cast<std::int64_t>(key) / 2 * stride + query + i * kLanes;
          store(to.dscore_steps + step_at, interleave_halves(narrow(g[0][i].ds, g[1][i].ds)));
        } else {
          for (int j = 0; j < 2; ++j) {
            const std::int64_t at = static_cast<std::int64_t>(key + i) * stride + query + j * kLanes;
            store(to.scores + at, g[i][j].p);
            store(to.dprobabilities + at, g[i][j].ds);
          }
        }
      }
    }
  }
}

/// Computes S^T or dP^T = left·right, summed over `width`.
template <Product kProduct>
void multiply_transposed(const BackwardTile& t, float* target, const float* left, const float* right, int width) {
  contract<kProduct, Order::kRows>({.a = left,
                                    .a_stride = summed_stride<kProduct>(width),
                                    .b = right,
                                    .b_stride = t.sizes.tile_m,
                                    .c = target,
                                    .c_stride = t.sizes.tile_m,
                                    .rows = t.tile.keys,
                                    .columns = t.tile.queries,
                                    .steps = width,
                                    .accumulate = false,
                                    .columns_of_row = t.tile.visible.queries_of_key});
}

/// Adds dK += dS^T·Q or dV += P^T·dO.
template <Product kProduct>
void add_key_gradient(const BackwardTile& t, float* target, const float* left, const float* right, int width) {
  contract_visible<kProduct, Order::kRows>({.a = left,
                                            .a_stride = t.sizes.tile_m / elements_per_step(kProduct),
                                            .b = right,
                                            .b_stride = column_stride(width),
                                            .c = target,
                                            .c_stride = column_stride(width),
                                            .rows = t.tile.keys,
                                            .columns = width,
                                            .steps = t.tile.queries,
                                            .steps_of_row = t.tile.visible.queries_of_key},
                                           t.buffers.shield);
}

/// Adds dQ += dS·K.
template <Product kProduct>
void add_query_gradient(const BackwardTile& t, const float* dscore_steps, const float* keys) {
  constexpr bool kTiles = kUsesTiles<kProduct>;
  const int row_words = t.sizes.tile_n / 2;
  if constexpr (kTiles) {
    // Tiles want dS, in rows of pairs of keys. Scores are not needed any more.
    transpose_words(t.buffers.scores, row_words, dscore_steps, t.sizes.tile_m,
                    round_up(t.tile.keys, kKeyPadding<kProduct>) / 2, round_up(t.tile.queries, kLanes));
  }
  contract_visible<kProduct, kTiles ? Order::kRows : Order::kSteps>({.a = kTiles ? t.buffers.scores : dscore_steps,
                                                                     .a_stride = kTiles ? row_words : t.sizes.tile_m,
                                                                     .b = keys,
                                                                     .b_stride = column_stride(t.sizes.head_dim),
                                                                     .c = t.dq,
                                                                     .c_stride = column_stride(t.sizes.head_dim),
                                                                     .rows = t.tile.queries,
                                                                     .columns = t.sizes.head_dim,
                                                                     .steps = t.tile.keys,
                                                                     .steps_of_row = t.tile.visible.keys_of_query},
                                                                    t.buffers.shield);
}

template <class T>
void backward_tile(const BackwardTile& t) {
  constexpr Product kProduct = kProductOf<T>;
  constexpr bool kPairs = kProduct == Product::kPairs;
  [[maybe_unused]] const TileScope<kUsesTiles<kProduct>> tiles;
  const BackwardBuffers& at = t.buffers;
  const int width = t.sizes.head_dim, width_v = t.sizes.head_dim_v;
  multiply_transposed<kProduct>(t, at.scores, at.keys, at.queries_transposed, width);
  if (t.wanted.dq || t.wanted.dk) {
    multiply_transposed<kProduct>(t, at.dprobabilities, at.values, at.dout_transposed, width_v);
  }
  if (t.scores.map.maps() || has_steep_rows(t)) {
    score_gradients<kProduct, false>(t);
  } else {
    score_gradients<kProduct, true>(t);
  }
  if (t.wanted.dv) {
    add_key_gradient<kProduct>(t, at.dv, kPairs ? at.probabilities : at.scores, kPairs ? at.dout_steps : at.dout,
                               width_v);
  }
  if (t.wanted.dk) {
    add_key_gradient<kProduct>(t, at.dk, kPairs ? at.dscores : at.dprobabilities, kPairs ? at.query_steps : at.queries,
                               width);
  }
  if (t.wanted.dq) {
    add_query_gradient<kProduct>(t, kPairs ? at.dscore_steps : at.dprobabilities, kPairs ? at.key_steps : at.keys);
  }
}

/// Loads a square of the caller's elements as words, one register for each row, with 0 past the last row and column.
template <class T>
FLASHTILE_INLINE void load_square(Vec (&square)[kLanes], HeadRows source, int row, int rows, int word, int words) {
  constexpr int kPerWord = elements_per_step(kProductOf<T>);
  for (int i = 0; i < kLanes; ++i) {
    float values[kLanes] = {};
    if (row + i < rows) {
      const T* const from = static_cast<const T*>(source.data) + (row + i) * source.stride + word * kPerWord;
      const int count = min(kLanes, words - word);
      if constexpr (kPerWord == 2) {
        std::memcpy(values, from, sizeof(float) * count);
      } else {
        for (int j = 0; j < count; ++j) values[j] = widen(from[j]);
      }
    }
    square[i] = load(values);
  }
}

/// Returns a square's diagonal.
FLASHTILE_INLINE Vec diagonal(const Vec (&square)[kLanes]) {
  Vec v{};
  for (int i = 0; i < kLanes; ++i) v[i] = square[i][i];
  return v;
}

/// Adds in the order in which contract adds dO·V: so dP − delta is exactly 0 where a row sees only one key.
template <class T>
void row_dots(float* sums, HeadRows a, HeadRows b, int rows, int columns) {
  constexpr Product kProduct = kProductOf<T>;
  [[maybe_unused]] const TileScope<kUsesTiles<kProduct>> tiles;
  const int words = columns / elements_per_step(kProduct);
  for (int row = 0; row < rows; row += kLanes) {
    Vec sum{};
    if constexpr (kUsesTiles<kProduct>) clear_tile<0>();
    for (int word = 0; word < words; word += kLanes) {
      Vec x[kLanes], y[kLanes];
      load_square<T>(x, a, row, rows, word, words);
      load_square<T>(y, b, row, rows, word, words);
      transpose(y);
      if constexpr (kUsesTiles<kProduct>) {
        // Only the diagonal is wanted, but no other instruction is sure to round as these do.
        load_tile<4>(reinterpret_cast<const float*>(x), kLanes);
        load_tile<6>(reinterpret_cast<const float*>(y), kLanes);
        multiply_tiles<0, 4, 6>();
      } else {
        transpose(x);
        for (int i = 0; i < kLanes; ++i) sum = multiply_add<kProduct>(sum, x[i], y[i]);
      }
    }
    if constexpr (kUsesTiles<kProduct>) {
      Vec products[kLanes];
      store_tile<0>(reinterpret_cast<float*>(products), kLanes);
      sum = diagonal(products);
    }
    for (int i = 0; i < min(kLanes, rows - row); ++i) sums[row + i] = sum[i];
  }
}

template <class T>
void store_rows(HeadRows target, const float* source, int rows, int columns, float factor) {
  for (int row = 0; row < rows; ++row) {
    store_row(static_cast<T*>(target.data) + row * target.stride, source + row * column_stride(columns), columns,
              factor);
  }
}

}  // namespace
}  // namespace flashtile::cpu
