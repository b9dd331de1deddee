#include "tiling.h"

#include "flashtile/math/softmax.h"

namespace flashtile::cpu {

Scores head_scores(const Problem& problem, const TensorView& alibi_slopes, int batch, int head) {
  const ScoreMap map = ScoreMap::of(problem.scale, problem.softcap);
  float slope = 0;
  if (alibi_slopes.given()) {
    const auto& strides = alibi_slopes.strides;
    const std::int64_t at = alibi_slopes.rank == 1 ? head * strides[0] : batch * strides[0] + head * strides[1];
    slope = static_cast<const float*>(alibi_slopes.data)[at];
  }
  return {map.outer_log2, map.inner, slope * kLog2e};
}

namespace {

void local_ranges(Range* target, Range rows, Range columns, Band band, Lengths lengths) {
  for (int row = rows.begin; row < rows.end; ++row) {
    const Range visible = band.columns(row, lengths);
    target[row - rows.begin] = {std::clamp(visible.begin, columns.begin, columns.end) - columns.begin,
                                std::clamp(visible.end, columns.begin, columns.end) - columns.begin};
  }
}

}  // namespace

Tile make_tile(const Problem& problem, const TileRows& rows, bool edge, const EdgeBuffers& buffers) {
  const Lengths lengths = problem.lengths();
  Tile tile{rows.queries.end - rows.queries.begin,
            rows.keys.end - rows.keys.begin,
            rows.keys.begin - lengths.diagonal(rows.queries.begin),
            {}};
  if (!edge) return tile;
  local_ranges(buffers.keys_of_query, rows.queries, rows.keys, problem.band, lengths);
  local_ranges(buffers.queries_of_key, rows.keys, rows.queries, problem.band.transposed(), lengths.transposed());
  tile.visible = {buffers.queries_of_key, buffers.keys_of_query};
  return tile;
}

}  // namespace flashtile::cpu
