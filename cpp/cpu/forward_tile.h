// This file is the forward of one block of queries, one tile of keys at a time: S^T = K·Q^T, online softmax, O += P·V.
#pragma once

#include "flashtile/math/state.h"
#include "pack.h"
#include "scores.h"

namespace flashtile::cpu {
namespace {

template <class T>
void forward_begin(const ForwardBlock& block) {
  constexpr Product kProduct = kProductOf<T>;
  const Sizes& sizes = block.sizes;
  const ForwardBuffers& to = block.buffers;
  load_rows<T>(to.queries, block.q, block.queries, sizes.head_dim, {0, sizes.tile_m});
  const int stride = summed_stride<kProduct>(sizes.head_dim);
  transpose_words(to.queries_transposed, sizes.tile_m, to.queries, stride, sizes.tile_m, stride);
  std::memset(to.out, 0, sizeof(float) * sizes.tile_m * column_stride(sizes.head_dim_v));
  for (int i = 0; i < sizes.tile_m; ++i) {
    to.reference[i] = -kInfinity;
    to.sum[i] = 0;
  }
}

/// Returns the keys that any of the queries [begin, end) sees, in whole pairs.
FLASHTILE_INLINE Range seen_keys(const Tile& tile, int begin, int end) {
  if (tile.visible.keys_of_query == nullptr) return {0, tile.keys};
  const Range* const keys = tile.visible.keys_of_query;
  const int first = keys[begin].begin / 2 * 2, last = keys[min(end, tile.queries) - 1].end;
  return last <= first ? Range{0, 0} : Range{first, min(round_up(last, 2), tile.keys)};
}

/// Replaces scores of +inf, which Q·K has beyond float32's range, by the largest float32. Returns the row maxima then.
inline Vec make_finite(float* scores, Range keys, int stride) {
  Vec top = splat(-kInfinity);
  for (int key = keys.begin; key < keys.end; ++key) {
    const Vec finite = min_or_second(splat(kLargest), load(scores + key * stride));
    store(scores + key * stride, finite);
    top = max_or_second(finite, top);
  }
  return top;
}

/// Weights are multiplied with this before they are rounded to e4m3, which loses precision below 2^-6. So are those of
/// Hopper's kernel (see DescaledWeights).
constexpr float kFactorOfE4m3 = 2;

/// Does RowState::rebase and computes the tile's P^T, for kVectors registers of queries from `column` on. With kToE4m3
/// it rounds weights to e4m3, after it has summed them.
template <Product kProduct, int kVectors, bool kToE4m3 = false>
void online_softmax(const ForwardBlock& block, const Tile& tile, int column) {
  const ForwardBuffers& to = block.buffers;
  const int stride = block.sizes.tile_m;
  const float unit_log2 = block.scores.map.unit_log2;
  float* const scores = to.scores + column;
  const Range seen = seen_keys(tile, column, column + kVectors * kLanes);
  Vec top[kVectors], reference[kVectors], sum[kVectors];
  for (int j = 0; j < kVectors; ++j) top[j] = splat(-kInfinity);
  for (int key = seen.begin; key < seen.end; ++key) {
    for (int j = 0; j < kVectors; ++j) top[j] = max_or_second(load(scores + key * stride + j * kLanes), top[j]);
  }
  IntVec infinite{};
  for (int j = 0; j < kVectors; ++j) infinite |= top[j] > kLargest;
  if (any(infinite)) [[unlikely]] {
    for (int j = 0; j < kVectors; ++j) top[j] = make_finite(scores + j * kLanes, seen, stride);
  }
  for (int j = 0; j < kVectors; ++j) {
    const int i = column + j * kLanes;
    const Vec old = load(to.reference + i);
    const Vec next = max_or_second(top[j], old);
    store(to.reference + i, next);
    reference[j] = next == -kInfinity ? Vec{} : next;  // a row that saw nothing yet must not compute −inf − −inf
    const Vec rescale = exp2(old - reference[j], unit_log2);
    store(to.rescale + i, rescale);
    store(to.sum + i, load(to.sum + i) * rescale);
    sum[j] = Vec{};
  }
  const auto probability = [&](int key, int j, Vec& total) {
    const int at = key * stride + j * kLanes;
    Vec p = exp2(load(scores + at) - reference[j], unit_log2);
    total += p;
    if constexpr (kToE4m3) p = round_to_e4m3(p * kFactorOfE4m3) * (1 / kFactorOfE4m3);
    return tile.dropout == nullptr ? p : p * load(tile.dropout + column + at);
  };
  const auto step = [&](int key, int j, Vec& total) {
    const Vec p = probability(key, j, total);
    if constexpr (kProduct == Product::kFloats) return p;
    return interleave_halves(narrow(p, key + 1 < seen.end ? probability(key + 1, j, total) : Vec{}));
  };
  if constexpr (kUsesTiles<kProduct>) {
    // Tiles want P, in rows of pairs of keys.
    const int row_words = block.sizes.tile_n / 2;
    for (int j = 0; j < kVectors; ++j) {
      Vec total{};
      float* const rows = to.probabilities + (column + j * kLanes) * row_words;
      for (int key = 0; key < tile.keys; key += 2 * kLanes) {
        Vec square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int at = key + 2 * i;
          square[i] = seen.begin <= at && at < seen.end ? step(at, j, total) : Vec{};
        }
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(rows + i * row_words + key / 2, square[i]);
      }
      sum[j] = total;
    }
  } else {
    constexpr int kPerStep = elements_per_step(kProduct);
    float* const target = (kProduct == Product::kPairs ? to.probabilities : to.scores) + column;
    const auto hide_keys = [&](int begin, int end) {
      for (int key = begin; key < end; key += kPerStep) {
        for (int j = 0; j < kVectors; ++j) store(target + key / kPerStep * stride + j * kLanes, Vec{});
      }
    };
    hide_keys(0, seen.begin);
    for (int key = seen.begin; key < seen.end; key += kPerStep) {
      for (int j = 0; j < kVectors; ++j) store(target + key / kPerStep * stride + j * kLanes, step(key, j, sum[j]));
    }
    hide_keys(round_up(seen.end, kPerStep), tile.keys);
  }
  for (int j = 0; j < kVectors; ++j) {
    float* const total = to.sum + column + j * kLanes;
    store(total, load(total) + sum[j]);
  }
}

template <class T, bool kToE4m3 = false>
void forward_tile(const ForwardBlock& block, const Tile& tile, HeadRows k, HeadRows v) {
  constexpr Product kProduct = kProductOf<T>;
  const Sizes& sizes = block.sizes;
  const ForwardBuffers& at = block.buffers;
  constexpr bool kPairs = kProduct == Product::kPairs, kTiles = kUsesTiles<kProduct>;
  [[maybe_unused]] const TileScope<kTiles> tiles;
  load_rows<T>(at.keys, k, tile.keys, sizes.head_dim, {0, tile.keys});
  load_steps<T>(at.values, v, tile.keys, sizes.head_dim_v, round_up(tile.keys, kKeyPadding<kProduct>));

  contract<kProduct, Order::kRows>({.a = at.keys,
                                    .a_stride = summed_stride<kProduct>(sizes.head_dim),
                                    .b = at.queries_transposed,
                                    .b_stride = sizes.tile_m,
                                    .c = at.scores,
                                    .c_stride = sizes.tile_m,
                                    .rows = tile.keys,
                                    .columns = block.queries,
                                    .steps = sizes.head_dim,
                                    .accumulate = false,
                                    .columns_of_row = tile.visible.queries_of_key});

  if (block.scores.map.maps()) map_scores(block.scores, tile, at.scores, sizes.tile_m);
  if (tile.visible.queries_of_key != nullptr) hide(tile, at.scores, sizes.tile_m);
  int column = 0;
  for (; column + kSoftmaxVectors * kLanes <= block.queries; column += kSoftmaxVectors * kLanes) {
    online_softmax<kProduct, kSoftmaxVectors, kToE4m3>(block, tile, column);
  }
  for (; column < block.queries; column += kLanes) {
    online_softmax<kProduct, 1, kToE4m3>(block, tile, column);
  }

  constexpr Order kOrder = kTiles ? Order::kRows : Order::kSteps;
  contract_visible<kProduct, kOrder>({.a = kPairs ? at.probabilities : at.scores,
                                      .a_stride = kTiles ? sizes.tile_n / 2 : sizes.tile_m,
                                      .b = at.values,
                                      .b_stride = column_stride(sizes.head_dim_v),
                                      .c = at.out,
                                      .c_stride = column_stride(sizes.head_dim_v),
                                      .rows = block.queries,
                                      .columns = sizes.head_dim_v,
                                      .steps = tile.keys,
                                      .factor = at.rescale,
                                      .steps_of_row = tile.visible.keys_of_query},
                                     at.shield);
}

template <class T>
void forward_end(const ForwardBlock& block) {
  const ForwardBuffers& from = block.buffers;
  const int width = block.sizes.head_dim_v, stride = column_stride(width);
  for (int row = 0; row < block.queries; ++row) {
    store_row(row_at<T>(block.out, row), from.out + row * stride, width, from.rescale[row]);
  }
}

}  // namespace
}  // namespace flashtile::cpu
