// This file holds what forward, backward and attention over a cache share: where a head's rows lie, which elements of a
// tile are visible, and how a thread's memory is divided.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "flashtile/mask/columns.h"
#include "flashtile/plan.h"
#include "kernels.h"

namespace flashtile::cpu {

constexpr std::int64_t round_up(std::int64_t x, std::int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

/// An arena hands out pieces of a block of memory; with no block it only adds up their sizes.
class Arena {
 public:
  explicit Arena(void* memory = nullptr) : memory_(static_cast<std::byte*>(memory)) {}

  template <class T = float>
  T* take(std::int64_t count) {
    const std::int64_t at = bytes_;
    // Buffers take whole cache lines, and an odd number of lines lies between them, so that equal rows fall into
    // different cache sets.
    bytes_ += round_up(count * static_cast<std::int64_t>(sizeof(T)), kLine) + 5 * kLine;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + at);
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::int64_t kLine = 64;
  std::byte* memory_;
  std::int64_t bytes_ = 0;
};

/// Returns tile sizes no larger than the lengths, in whole registers (two where bfloat16 pairs are written side by
/// side). For one batch entry these are the sizes that it has alone. Its tiles are still those of the whole problem's
/// sizes: where the two sizes differ, the entry has only one tile.
inline Sizes fit(Sizes sizes, Lengths lengths) {
  const auto fit_side = [](int tile, int length) {
    return static_cast<int>(round_up(std::clamp(length, 1, tile), 2 * kLanePadding));
  };
  sizes.tile_m = fit_side(sizes.tile_m, lengths.q);
  sizes.tile_n = fit_side(sizes.tile_n, lengths.k);
  return sizes;
}

/// These are `count` query heads of a group side by side: row r is head r % count of query r / count, counted from the
/// first of each, so that keys are read once for all of them.
struct PackedHeads {
  int count = 1;
  int first = 0;

  int query(int row) const { return row / count; }
  int head(int row) const { return first + row % count; }
  Span rows(const Span& queries) const { return {0, queries.size * count, queries.used * count}; }
  Range queries(Range rows) const { return {query(rows.begin), query(rows.end - 1) + 1}; }
};

/// Returns sizes for any entry of the problem, each of which may be as long as a whole ragged batch.
inline Sizes tile_sizes(const Problem& problem, const Variant& variant, int packed_heads = 1) {
  return fit({variant.tile_m, variant.tile_n, problem.head_dim, problem.head_dim_v},
             {problem.seqlen_q * packed_heads, problem.seqlen_k});
}

/// Returns the rows of one head of a (B, S, H, D) tensor, from `row` on. Of a ragged batch, B is 1 and the batch stride
/// 0, so that `row` counts the rows of all sequences.
inline HeadRows head_rows(const TensorView& t, int batch, int head, int row) {
  const std::int64_t offset = batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
  return {static_cast<std::byte*>(t.data) + offset * bytes_of(t.dtype), t.strides[1]};
}

/// Returns the rows [begin, end) of packed `heads`, where row 0 is `first_row` of the tensor. `starts` has room for
/// them.
HeadRows packed_rows(const TensorView& t, int batch, const PackedHeads& heads, int first_row, Range rows,
                     std::int64_t* starts);

/// Writes zeros to rows of one head.
inline void clear_rows(const TensorView& t, int batch, int head, Range rows) {
  const HeadRows target = head_rows(t, batch, head, 0);
  for (int row = rows.begin; row < rows.end; ++row) {
    std::memset(static_cast<std::byte*>(target.data) + row * target.stride * bytes_of(t.dtype), 0,
                static_cast<std::size_t>(t.shape[3] * bytes_of(t.dtype)));
  }
}

/// Returns the score map of one head.
Scores head_scores(const Problem& problem, const TensorView& alibi_slopes, int batch, int head);

/// These are the rows and keys of a tile, by their indices in the batch entry. A row is a query, unless heads are
/// packed.
struct TileRows {
  int batch;
  PackedHeads heads;
  Lengths lengths;
  Range queries;
  Range keys;
  const HiddenRows* columns = nullptr;  // of the tile's keys, where there is a column mask

  /// Returns the kind of the tile, which the band has found not to be hidden, and of which kind that is without
  /// columns.
  BlockKind kind(BlockKind of_band, Band band) const {
    return columns == nullptr ? of_band : kind_of_block(columns, keys, queries, band, lengths);
  }
};

/// Returns the columns of a column mask for a query head and for the keys of `k` from `first_key` on, as TileRows has
/// them, or null where there is no such mask.
inline const HiddenRows* columns_of(const Problem& problem, const TensorView& mask, int batch, int head, Span k,
                                    int first_key) {
  const ColumnRanges columns = ColumnRanges::of(mask, problem.heads_q);
  return columns.given() ? columns.of_mask(batch, columns.mask_of(head), k) + first_key : nullptr;
}

/// These buffers are for what only some tiles have.
struct TileBuffers {
  Range* queries_of_key;  // (N), of an edge tile
  Range* keys_of_query;   // (M), of an edge tile
  float* dropout;         // (N, M), with dropout
};

inline TileBuffers take_tile_buffers(Arena& arena, const Sizes& s, bool dropout) {
  return {arena.take<Range>(s.tile_n), arena.take<Range>(s.tile_m),
          dropout ? arena.take(std::int64_t{s.tile_n} * s.tile_m) : nullptr};
}

/// Returns the tile as the kernels see it; `kind` is what its queries see of its keys.
Tile make_tile(const Problem& problem, const Sizes& sizes, const TileRows& rows, BlockKind kind,
               const TileBuffers& buffers);

inline Range tile_range(int index, int tile, int length) {
  return {index * tile, std::min((index + 1) * tile, length)};
}

/// These are the rows of one of an entry's blocks: first those that count.
struct BlockRows {
  Range used;
  Range unused;
};

inline BlockRows block_rows(int index, int tile, const Span& span) {
  const Range all = tile_range(index, tile, span.size);
  const int end = std::clamp(span.used, all.begin, all.end);
  return {{all.begin, end}, {end, all.end}};
}

}  // namespace flashtile::cpu
