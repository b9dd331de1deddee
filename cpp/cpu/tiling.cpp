#include "tiling.h"

#include "flashtile/math/score_params.h"

namespace flashtile::cpu {

Scores head_scores(const Problem& problem, const TensorView& alibi_slopes, int batch, int head) {
  return {problem.score_map(), AlibiSlopes::of(alibi_slopes).at(batch, head)};
}

HeadRows packed_rows(const TensorView& t, int batch, const PackedHeads& heads, int first_row, Range rows,
                     std::int64_t* starts) {
  const HeadRows first = head_rows(t, batch, heads.first, first_row);
  if (heads.count == 1) return head_rows(t, batch, heads.first, first_row + rows.begin);
  for (int row = rows.begin; row < rows.end; ++row)
    starts[row - rows.begin] = heads.query(row) * t.strides[1] + (heads.head(row) - heads.first) * t.strides[2];
  return {first.data, 0, starts};
}

namespace {

/// Computes what each row of a tile sees of its columns, where each row and column of `mask` is repeated so many times.
void local_ranges(Range* target, Range rows, int times_rows, Range columns, int times_columns, Mask mask,
                  Lengths lengths) {
  for (int row = rows.begin; row < rows.end; ++row) {
    const Range visible = mask.columns(row / times_rows, lengths);
    target[row - rows.begin] = {
        std::clamp(visible.begin * times_columns, columns.begin, columns.end) - columns.begin,
        std::clamp(visible.end * times_columns, columns.begin, columns.end) - columns.begin,
    };
  }
}

/// Fills the factor of each weight: 0 where it is dropped. It goes by whole squares of 16 × 16, which hold all sixteen
/// of the elements that share random words, since tiles begin at multiples of 16.
void fill_dropout(float* target, const Dropout& dropout, const TileRows& rows, int stride) {
  for (int key = rows.keys.begin; key < rows.keys.end; key += 16) {
    for (int query = rows.queries.begin; query < rows.queries.end; query += 16) {
      for (int i = 0; i < 16; ++i) {
        const int row = query + i % 4 * 2, column = key + i / 4 * 2;
        const Philox words = dropout.words(rows.batch, rows.heads.first, row, column);
        float* const at = target + (column - rows.keys.begin) * stride + (row - rows.queries.begin);
        for (const int of_key : {0, 1, 8, 9})
          for (const int of_row : {0, 1, 8, 9})
            at[of_key * stride + of_row] = dropout.keeps(words, of_row, of_key) ? dropout.scale : 0.0f;
      }
    }
  }
}

}  // namespace

Tile make_tile(const Problem& problem, const Sizes& sizes, const TileRows& rows, BlockKind kind,
               const TileBuffers& buffers) {
  const Lengths lengths = rows.lengths;
  Tile tile{rows.queries.end - rows.queries.begin,
            rows.keys.end - rows.keys.begin,
            rows.keys.begin - problem.mask().origin(rows.heads.query(rows.queries.begin), lengths),
            {},
            buffers.dropout};
  if (problem.dropout.active()) fill_dropout(buffers.dropout, problem.dropout, rows, sizes.tile_m);
  if (kind != BlockKind::kEdge) return tile;
  const int packed = rows.heads.count;
  local_ranges(buffers.keys_of_query, rows.queries, packed, rows.keys, 1, problem.mask(), lengths);
  local_ranges(buffers.queries_of_key, rows.keys, 1, rows.queries, packed, problem.mask().transposed(),
               lengths.transposed());
  tile.visible = {buffers.queries_of_key, buffers.keys_of_query, rows.columns, rows.queries.begin};
  return tile;
}

}  // namespace flashtile::cpu
