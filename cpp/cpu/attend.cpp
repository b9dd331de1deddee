#include "attend.h"

#include <atomic>

#include "flashtile/row_results.h"

namespace flashtile::cpu {

AttendMemory take_attend_memory(Arena& arena, const Sizes& s, bool dropout) {
  const std::int64_t m = s.tile_m, n = s.tile_n;
  const std::int64_t d = round_up(s.head_dim, kLanePadding), d_v = round_up(s.head_dim_v, kLanePadding);
  return {.buffers = {.queries = arena.take(m * d),
                      .queries_transposed = arena.take(d * m),
                      .keys = arena.take(n * d),
                      .values = arena.take(n * d_v),
                      .scores = arena.take(n * m),
                      .probabilities = arena.take(n * m),
                      .out = arena.take(m * d_v),
                      .reference = arena.take(m),
                      .sum = arena.take(m),
                      .rescale = arena.take(m),
                      .shield = arena.take(n * d_v)},
          .tile = take_tile_buffers(arena, s, dropout),
          .query_starts = arena.take<std::int64_t>(m),
          .out_starts = arena.take<std::int64_t>(m)};
}

namespace {

/// This writes what is wanted of the rows of a work item besides their output.
class Rows {
 public:
  Rows(const Problem& problem, const ForwardTensors& t, const Item& item, const PackedHeads& heads)
      : results_(RowResults::of(problem, t)), item_(item), heads_(heads) {}

  bool wanted() const { return results_.wanted(); }
  void store(int row, const FinishedRow& finished, float unit) const {
    const std::int64_t at = results_.strides.at(item_.batch, heads_.head(row), item_.rows.q.first + heads_.query(row));
    results_.store(at, finished, unit);
  }

  /// Makes the largest logit of the row's head at least `logit`, beside other threads.
  void raise(int row, float logit) const {
    if (!results_.largest.wanted()) return;
    const std::atomic_ref largest(*results_.largest.at(item_.batch, heads_.head(row)));
    float found = largest.load(std::memory_order_relaxed);
    while (logit > found && !largest.compare_exchange_weak(found, logit, std::memory_order_relaxed)) continue;
  }

 private:
  RowResults results_;
  const Item& item_;
  const PackedHeads& heads_;
};

}  // namespace

void clear_unused(const Problem& problem, const ForwardTensors& t, const Item& item, const PackedHeads& heads,
                  Range rows) {
  const Rows results(problem, t, item, heads);
  const float unit = problem.score_map().unit;
  for (int row = rows.begin; row < rows.end; ++row) {
    const int at = item.rows.q.first + heads.query(row);
    clear_rows(t.out, item.batch, heads.head(row), {at, at + 1});
    results.store(row, {}, unit);
  }
}

void normalise(const Problem& problem, const ForwardTensors& t, const Item& item, const PackedHeads& heads, Range rows,
               const ForwardBuffers& buffers) {
  const Rows results(problem, t, item, heads);
  const float unit = problem.score_map().unit;
  const auto* const sinks = static_cast<const float*>(t.sinks.data);
  for (int row = rows.begin; row < rows.end; ++row) {
    const int i = row - rows.begin;
    const RowState state{buffers.reference[i], buffers.sum[i]};
    const RowTotal total = state.total(sinks != nullptr ? sinks[heads.head(row)] : -kInfinity, unit);
    buffers.rescale[i] = total.normaliser;
    if (results.wanted()) results.store(row, total.finished(), unit);
    results.raise(row, state.reference * unit);  // which here is the largest score
  }
}

}  // namespace flashtile::cpu
