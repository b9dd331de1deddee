// What the forward and the backward driver share: where a head's rows lie, which tiles are visible, how a thread's
// memory is divided.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "flashtile/plan.h"
#include "kernels.h"

namespace flashtile::cpu {

constexpr std::int64_t round_up(std::int64_t x, std::int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

/// Hands out pieces of a block of memory; with no block it only adds up their sizes.
class Arena {
 public:
  explicit Arena(void* memory = nullptr) : memory_(static_cast<std::byte*>(memory)) {}

  template <class T = float>
  T* take(std::int64_t count) {
    const std::int64_t at = bytes_;
    // Whole cache lines, and an odd number of them between buffers, so that equal rows fall into different cache sets.
    bytes_ += round_up(count * static_cast<std::int64_t>(sizeof(T)), kLine) + 5 * kLine;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + at);
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::int64_t kLine = 64;
  std::byte* memory_;
  std::int64_t bytes_ = 0;
};

/// Tiles no larger than the problem, in whole registers (two where bfloat16 pairs are written side by side).
inline Sizes tile_sizes(const Problem& problem, const Variant& variant) {
  const auto fit = [](int tile, int length) {
    return static_cast<int>(round_up(std::clamp(length, 1, tile), 2 * kLanePadding));
  };
  return {fit(variant.tile_m, problem.seqlen_q), fit(variant.tile_n, problem.seqlen_k), problem.head_dim,
          problem.head_dim_v};
}

/// Rows of one head of a (B, S, H, D) tensor, from `row` on.
inline HeadRows head_rows(const TensorView& t, int batch, int head, int row) {
  const std::int64_t offset = batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
  return {static_cast<std::byte*>(t.data) + offset * bytes_of(t.dtype), t.strides[1]};
}

/// The score map of one head.
Scores head_scores(const Problem& problem, const TensorView& alibi_slopes, int batch, int head);

/// The queries and keys of a tile.
struct TileRows {
  int batch;
  int head;  // of the queries
  Range queries;
  Range keys;
};

/// Room for what only some tiles have.
struct TileBuffers {
  Range* queries_of_key;  // (N), of an edge tile
  Range* keys_of_query;   // (M), of an edge tile
  float* dropout;         // (N, M), with dropout
};

inline TileBuffers take_tile_buffers(Arena& arena, const Sizes& s, bool dropout) {
  return {arena.take<Range>(s.tile_n), arena.take<Range>(s.tile_m),
          dropout ? arena.take(std::int64_t{s.tile_n} * s.tile_m) : nullptr};
}

/// The tile as the kernels see it; `edge`: it may hold hidden elements.
Tile make_tile(const Problem& problem, const Sizes& sizes, const TileRows& rows, bool edge, const TileBuffers& buffers);

inline Range tile_range(int index, int tile, int length) {
  return {index * tile, std::min((index + 1) * tile, length)};
}

}  // namespace flashtile::cpu
