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
          .tile = take_tile_buffers(arena, s, dropout)};
}

void normalise(const ForwardBlock& block, float sink_log2, float* lse) {
  const ForwardBuffers& rows = block.buffers;
  for (int i = 0; i < block.queries; ++i) {
    RowState state{rows.reference_log2[i], rows.sum[i]};
    const float factor = state.join(sink_log2);
    rows.rescale[i] = factor * state.normaliser();
    if (lse != nullptr) lse[i] = state.lse();
  }
}

}  // namespace flashtile::cpu
