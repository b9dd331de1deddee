#include "attend.h"

namespace flashtile::cpu {

AttendMemory take_attend_memory(Arena& arena, const Sizes& s, bool dropout) {
  const std::int64_t m = s.tile_m, n = s.tile_n;
  const std::int64_t d = round_up(s.head_dim, kLanePadding), d_v = round_up(s.head_dim_v, kLanePadding);
  return {.buffers = {.queries = arena.take(m * d),
                      .queries_transposed = arena.take(d * m),
                      .keys = arena.take(n * d),
                      .values = arena.take(n * d_v),
                      .value_steps = arena.take(n * d_v),
                      .scores = arena.take(n * m),
                      .probabilities = arena.take(n * m),
                      .out = arena.take(m * d_v),
                      .reference_log2 = arena.take(m),
                      .sum = arena.take(m),
                      .rescale = arena.take(m),
                      .shield = arena.take(n * d_v)},
          .tile = take_tile_buffers(arena, s, dropout),
          .query_starts = arena.take<std::int64_t>(m),
          .out_starts = arena.take<std::int64_t>(m)};
}

namespace {

float* lse_of(const ForwardTensors& t, const Problem& problem, const Item& item, const PackedHeads& heads, int row) {
  if (!t.lse.given()) return nullptr;
  return static_cast<float*>(t.lse.data) + first_lse(problem, item.rows.q, item.batch, heads.head(row)) +
         heads.query(row);
}

}  // namespace

void clear_unused(const Problem& problem, const ForwardTensors& t, const Item& item, const PackedHeads& heads,
                  Range rows) {
  for (int row = rows.begin; row < rows.end; ++row) {
    const int at = item.rows.q.first + heads.query(row);
    clear_rows(t.out, item.batch, heads.head(row), {at, at + 1});
    if (float* const lse = lse_of(t, problem, item, heads, row)) *lse = -kInfinity;
  }
}

void normalise(const Problem& problem, const ForwardTensors& t, const Item& item, const PackedHeads& heads, Range rows,
               const ForwardBuffers& buffers) {
  const auto* const sinks = static_cast<const float*>(t.sinks.data);
  for (int row = rows.begin; row < rows.end; ++row) {
    const int i = row - rows.begin;
    RowState state{buffers.reference_log2[i], buffers.sum[i]};
    const float factor = state.join(sinks != nullptr ? sinks[heads.head(row)] * kLog2e : -kInfinity);
    buffers.rescale[i] = factor * state.normaliser();
    if (float* const lse = lse_of(t, problem, item, heads, row)) *lse = state.lse();
  }
}

}  // namespace flashtile::cpu
