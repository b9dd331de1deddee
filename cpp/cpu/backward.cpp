// This file is the backward. Every gradient element belongs to one work item, which adds its tiles in one order, so
// that results do not depend on the number of threads.
//
// Fused, an item is a (batch, KV head) and forms dQ, dK and dV in one pass of five matmuls a tile, dQ in a float32
// accumulator of all its queries. Where that would leave threads idle, two passes of smaller items share the work
// instead: one item per tile of keys forms dK and dV, one per block of queries forms dQ, with seven matmuls a tile in
// all. Both ways add the same tiles in the same order.
#include <algorithm>
#include <cmath>

#include "cpu.h"
#include "dispatch.h"
#include "flashtile/row_results.h"
#include "items.h"
#include "parallel.h"
#include "tiling.h"

namespace flashtile::cpu {
namespace {

/// Kernels read the statistics of rows a pair of registers at a time, so they are padded to this.
constexpr int kRowPadding = 2 * kLanePadding;

struct ThreadMemory {
  BackwardBuffers buffers;
  TileBuffers tile;
  float* dq;  // (queries, D), of all queries of the item
};

ThreadMemory divide(Arena& arena, const Sizes& s, std::int64_t dq_rows, bool dropout) {
  const std::int64_t m = s.tile_m, n = s.tile_n;
  const std::int64_t d = round_up(s.head_dim, kLanePadding), d_v = round_up(s.head_dim_v, kLanePadding);
  return {.buffers = {.queries = arena.take(m * d),
                      .queries_transposed = arena.take(d * m),
                      .query_steps = arena.take(m * d),
                      .dout = arena.take(m * d_v),
                      .dout_transposed = arena.take(d_v * m),
                      .dout_steps = arena.take(m * d_v),
                      .keys = arena.take(n * d),
                      .key_steps = arena.take(n * d),
                      .values = arena.take(n * d_v),
                      .scores = arena.take(n * m),
                      .dprobabilities = arena.take(n * m),
                      .probabilities = arena.take(n * m),
                      .dscores = arena.take(n * m),
                      .dscore_steps = arena.take(n * m),
                      .dk = arena.take(n * d),
                      .dv = arena.take(n * d_v),
                      .shield = arena.take(std::max(m, n) * std::max(d, d_v))},
          .tile = take_tile_buffers(arena, s, dropout),
          .dq = arena.take(dq_rows * d)};
}

/// All threads share this memory. The statistics are one number per query row: for each head, the slots of all entries
/// (see Spans::places).
struct SharedMemory {
  float* reference;
  float* log2_sum;
  float* delta;
  Items::Entry* items;  // table of the loop that runs
};

/// This is one backward call, which its work items share.
class Backward {
 public:
  Backward(const Problem& problem, const Variant& variant, int grid)
      : problem_(problem),
        sizes_(tile_sizes(problem, variant)),
        threads_(grid),
        sequences_(entries_of(problem, nullptr)),
        most_fused_(problem.seqlen_q) {
    if (problem.ragged) {
      // Where sequences have as many keys as queries, the longest one's share of the work is at least its share of the
      // rows.
      const double share = kFusedStretch * problem.heads_k / threads_;
      most_fused_ = static_cast<int>(std::min(share, 1.0) * problem.seqlen_q);
    } else {
      fused_ = pays_off(whole_heads());
    }
  }

  std::int64_t workspace_bytes() const {
    Arena shared, own;
    divide_shared(shared);
    divide_own(own);
    return shared.bytes() + threads_ * own.bytes();
  }

  void run(const BackwardTensors& tensors, void* workspace) {
    tensors_ = &tensors;
    kernel_ = &kernels(problem_);
    Arena shared(workspace), own;
    shared_ = divide_shared(shared);
    divide_own(own);
    thread_memory_ = static_cast<std::byte*>(workspace) + shared.bytes();
    thread_bytes_ = own.bytes();
    sequences_ = entries_of(problem_, &tensors.forward);
    if (problem_.ragged) fused_ = longest_sequence() <= most_fused_ && pays_off(whole_heads());

    run_rows();
    if (tensors.dsinks.given()) run_sinks();
    const Wanted wanted{tensors.dq.given(), tensors.dk.given(), tensors.dv.given()};
    const bool keys_wanted = wanted.dk || wanted.dv;
    if (fused_ && wanted.dq && keys_wanted) {
      run_fused(wanted);
    } else {
      if (keys_wanted) run_keys({.dq = false, .dk = wanted.dk, .dv = wanted.dv});
      if (wanted.dq) run_queries();
    }
  }

 private:
  /// The fused way may take this many times as long as an even share of the work would, because two passes compute
  /// seven matmuls a tile instead of five.
  static constexpr double kFusedStretch = 7.0 / 5;

  bool pays_off(const Items& heads) const { return heads.stretch(threads_) <= kFusedStretch; }

  int longest_sequence() const {
    int longest = 0;
    for (int batch = 0; batch < sequences_.q.batch; ++batch) longest = std::max(longest, sequences_.q.at(batch).used);
    return longest;
  }

  Items whole_heads() const {
    return {problem_, sequences_, shared_.items, problem_.heads_k, [](const Sequence&) { return 1; }};
  }
  Items key_tiles() const {
    return {problem_, sequences_, shared_.items, problem_.heads_k,
            [this](const Sequence& rows) { return Spans::tiles(rows.k.size, sizes_.tile_n); }};
  }
  Items query_blocks() const {
    return {problem_, sequences_, shared_.items, problem_.heads_q,
            [this](const Sequence& rows) { return Spans::tiles(rows.q.size, sizes_.tile_m); }};
  }

  std::int64_t dq_rows() const {
    const bool may_fuse = fused_ || problem_.ragged;
    return std::max<std::int64_t>(sizes_.tile_m, may_fuse ? std::int64_t{problem_.group()} * most_fused_ : 0);
  }
  std::int64_t dq_stride() const { return round_up(problem_.head_dim, kLanePadding); }

  SharedMemory divide_shared(Arena& arena) const {
    const std::int64_t rows = std::int64_t{problem_.heads_q} * sequences_.q.places(kRowPadding) * kRowPadding;
    return {arena.take(rows), arena.take(rows), arena.take(rows),
            arena.take<Items::Entry>(Items::table_size(problem_))};
  }

  ThreadMemory divide_own(Arena& arena) const { return divide(arena, sizes_, dq_rows(), problem_.dropout.active()); }

  ThreadMemory memory_of(int thread) const {
    Arena arena(thread_memory_ + thread * thread_bytes_);
    return divide_own(arena);
  }

  /// Returns the index of an entry's first row among the statistics.
  std::int64_t first_row(int batch, int head) const {
    const Spans& q = sequences_.q;
    const std::int64_t place = q.first_place(batch, q.at(batch).first, kRowPadding);
    return (std::int64_t{head} * q.places(kRowPadding) + place) * kRowPadding;
  }

  /// Fills the statistics of an item's rows: what the forward stored, and delta = rowsum(dO∘O) − dlse. Where a row sees
  /// nothing, and past the last row, a log2_sum of +inf makes every probability 0.
  void fill_rows(const Item& item) const {
    const Span& q = item.rows.q;
    const Range queries = block_rows(item.block, sizes_.tile_m, q).used;
    float* const reference = shared_.reference + first_row(item.batch, item.head);
    float* const log2_sum = shared_.log2_sum + first_row(item.batch, item.head);
    float* const delta = shared_.delta + first_row(item.batch, item.head);
    const RowResults results = RowResults::of(problem_, tensors_->forward);
    const std::int64_t at = results.strides.at(item.batch, item.head, q.first);
    const float unit = problem_.score_map().unit;
    const int first = q.first + queries.begin;
    kernel_->row_dots(delta + queries.begin, head_rows(tensors_->dout, item.batch, item.head, first),
                      head_rows(tensors_->forward.out, item.batch, item.head, first), queries.end - queries.begin,
                      problem_.head_dim_v);
    for (int i = queries.begin; i < queries.end; ++i) {
      const FinishedRow row = results.load(at + i, unit);
      reference[i] = row.reference;
      log2_sum[i] = row.saw_nothing() ? kInfinity : row.log2_sum;
      if (tensors_->dlse.given()) delta[i] -= static_cast<const float*>(tensors_->dlse.data)[at + i];
    }
    if (queries.empty()) return;
    for (std::int64_t i = queries.end; i < round_up(queries.end, kRowPadding); ++i) {
      reference[i] = 0;
      log2_sum[i] = kInfinity;
      delta[i] = 0;
    }
  }

  void run_rows() const {
    const Items blocks = query_blocks();
    parallel_for(threads_, blocks.count(), [&](int, std::int64_t item) { fill_rows(blocks.at(item)); });
  }

  /// Forms the sinks' gradients, Σ over rows of −P·delta, where P is the weight of the sink, whose value is 0. The sums
  /// are doubles because they are long.
  void run_sinks() const {
    parallel_for(threads_, problem_.heads_q, [this](int, std::int64_t head) {
      const float sink = static_cast<const float*>(tensors_->forward.sinks.data)[head];
      const float unit = problem_.score_map().unit;
      double sum = 0;
      for (int batch = 0; batch < sequences_.q.batch; ++batch) {
        const std::int64_t first = first_row(batch, static_cast<int>(head));
        for (std::int64_t i = first; i < first + sequences_.q.at(batch).used; ++i) {
          const FinishedRow row{shared_.reference[i], shared_.log2_sum[i]};
          sum -= std::exp2(std::min(row.above_lse_log2(sink, unit), 0.0f)) * shared_.delta[i];
        }
      }
      static_cast<float*>(tensors_->dsinks.data)[head] = static_cast<float>(sum);
    });
  }

  void load_keys(const ThreadMemory& memory, const Sizes& sizes, int batch, int head_k, int first, int count) const {
    kernel_->load_keys(sizes, memory.buffers, count, head_rows(tensors_->forward.k, batch, head_k, first),
                       head_rows(tensors_->forward.v, batch, head_k, first));
  }

  void load_queries(const ThreadMemory& memory, const Sizes& sizes, int batch, int head, int first, int count) const {
    kernel_->load_queries(sizes, memory.buffers, count, head_rows(tensors_->forward.q, batch, head, first),
                          head_rows(tensors_->dout, batch, head, first));
  }

  /// Writes the block `rows` of one of an entry's gradients, and zeros in those of its rows that do not count.
  void store_gradient(const TensorView& gradient, int batch, int head, const Span& span, BlockRows rows,
                      const float* sums, float factor) const {
    kernel_->store_rows(head_rows(gradient, batch, head, span.first + rows.used.begin), sums,
                        rows.used.end - rows.used.begin, static_cast<int>(gradient.shape[3]), factor);
    clear_rows(gradient, batch, head, {span.first + rows.unused.begin, span.first + rows.unused.end});
  }

  /// Computes one tile, whose rows are loaded; `dq` is the accumulator of its queries.
  void run_tile(const ThreadMemory& memory, const Sizes& sizes, Wanted wanted, const TileRows& rows, BlockKind kind,
                float* dq) const {
    const std::int64_t first = first_row(rows.batch, rows.heads.first) + rows.queries.begin;
    kernel_->backward_tile(
        {.sizes = sizes,
         .scores = head_scores(problem_, tensors_->forward.alibi_slopes, rows.batch, rows.heads.first),
         .wanted = wanted,
         .tile = make_tile(problem_, sizes, rows, kind, memory.tile),
         .reference = shared_.reference + first,
         .log2_sum = shared_.log2_sum + first,
         .delta = shared_.delta + first,
         .dq = dq,
         .buffers = memory.buffers});
  }

  /// Forms dK and dV of one tile of keys, from every query that sees it, and adds to dQ (of the group's heads) where
  /// wanted.
  void run_key_tile(const ThreadMemory& memory, Wanted wanted, const Item& item, int index) const {
    const Span &q = item.rows.q, &k = item.rows.k;
    const Lengths lengths = item.rows.lengths();
    const Sizes sizes = fit(sizes_, lengths);
    const int batch = item.batch, head_k = item.head;
    const BlockRows rows = block_rows(index, sizes_.tile_n, k);
    const Range keys = rows.used;
    std::fill_n(memory.buffers.dk, sizes.tile_n * dq_stride(), 0.0f);
    std::fill_n(memory.buffers.dv, sizes.tile_n * round_up(problem_.head_dim_v, kLanePadding), 0.0f);
    const BlockWalk walk = problem_.mask().transposed().walk(keys, sizes_.tile_m, lengths.transposed());
    if (!walk.empty()) load_keys(memory, sizes, batch, head_k, k.first + keys.begin, keys.end - keys.begin);
    for (int member = 0; member < problem_.group(); ++member) {
      const int head = head_k * problem_.group() + member;
      const HiddenRows* const columns = columns_of(problem_, tensors_->forward.mask, batch, head, k, keys.begin);
      for (int i = walk.first(); i < walk.end(); i = walk.next(i)) {
        const Range queries = tile_range(i, sizes_.tile_m, q.used);
        const TileRows tile{batch, {1, head}, lengths, queries, keys, columns};
        const BlockKind kind = tile.kind(walk.kind(i), problem_.band);
        if (kind == BlockKind::kSkip) continue;
        load_queries(memory, sizes, batch, head, q.first + queries.begin, queries.end - queries.begin);
        run_tile(memory, sizes, wanted, tile, kind,
                 wanted.dq ? memory.dq + (std::int64_t{member} * q.used + queries.begin) * dq_stride() : nullptr);
      }
    }
    if (wanted.dk) store_gradient(tensors_->dk, batch, head_k, k, rows, memory.buffers.dk, problem_.scale);
    if (wanted.dv) store_gradient(tensors_->dv, batch, head_k, k, rows, memory.buffers.dv, 1.0f);
  }

  void run_fused(Wanted wanted) const {
    const Items heads = whole_heads();
    parallel_for(threads_, heads.count(), [&](int thread, std::int64_t index) {
      const ThreadMemory memory = memory_of(thread);
      const Item item = heads.at(index);
      const Span &q = item.rows.q, &k = item.rows.k;
      std::fill_n(memory.dq, std::int64_t{problem_.group()} * q.used * dq_stride(), 0.0f);
      for (int i = 0; i < Spans::tiles(k.size, sizes_.tile_n); ++i) run_key_tile(memory, wanted, item, i);
      for (int member = 0; member < problem_.group(); ++member) {
        store_gradient(tensors_->dq, item.batch, item.head * problem_.group() + member, q, block_rows(0, q.size, q),
                       memory.dq + std::int64_t{member} * q.used * dq_stride(), problem_.scale);
      }
    });
  }

  void run_keys(Wanted wanted) const {
    const Items tiles = key_tiles();
    parallel_for(threads_, tiles.count(), [&](int thread, std::int64_t index) {
      // Under a causal mask the first tile is seen by most queries, so tiles are taken from the first: longest first.
      const Item item = tiles.at(index);
      run_key_tile(memory_of(thread), wanted, item, item.block);
    });
  }

  /// Forms dQ of one block of queries, from every key that it sees.
  void run_query_block(const ThreadMemory& memory, const Item& item, int index) const {
    const Span &q = item.rows.q, &k = item.rows.k;
    const Lengths lengths = item.rows.lengths();
    const Sizes sizes = fit(sizes_, lengths);
    const int batch = item.batch, head = item.head, head_k = head / problem_.group();
    const BlockRows rows = block_rows(index, sizes_.tile_m, q);
    const Range queries = rows.used;
    std::fill_n(memory.dq, sizes.tile_m * dq_stride(), 0.0f);
    const BlockWalk walk = problem_.mask().walk(queries, sizes_.tile_n, lengths);
    if (!walk.empty()) load_queries(memory, sizes, batch, head, q.first + queries.begin, queries.end - queries.begin);
    for (int i = walk.first(); i < walk.end(); i = walk.next(i)) {
      const Range keys = tile_range(i, sizes_.tile_n, k.used);
      const HiddenRows* const columns = columns_of(problem_, tensors_->forward.mask, batch, head, k, keys.begin);
      const TileRows tile{batch, {1, head}, lengths, queries, keys, columns};
      const BlockKind kind = tile.kind(walk.kind(i), problem_.band);
      if (kind == BlockKind::kSkip) continue;
      load_keys(memory, sizes, batch, head_k, k.first + keys.begin, keys.end - keys.begin);
      run_tile(memory, sizes, {.dq = true, .dk = false, .dv = false}, tile, kind, memory.dq);
    }
    store_gradient(tensors_->dq, batch, head, q, rows, memory.dq, problem_.scale);
  }

  void run_queries() const {
    const Items blocks = query_blocks();
    parallel_for(threads_, blocks.count(), [&](int thread, std::int64_t index) {
      const Item item = blocks.at(index);
      run_query_block(memory_of(thread), item, item.blocks - 1 - item.block);
    });
  }

  Problem problem_;
  Sizes sizes_;  // sizes of the largest tiles
  int threads_;
  Sequences sequences_;
  int most_fused_;  // most queries of an entry that the fused way takes
  bool fused_ = false;

  const BackwardTensors* tensors_ = nullptr;
  SharedMemory shared_{};
  const Kernels* kernel_ = nullptr;
  std::byte* thread_memory_ = nullptr;
  std::int64_t thread_bytes_ = 0;
};

}  // namespace

std::int64_t backward_workspace_bytes(const Problem& problem, const Variant& variant, int threads) {
  return Backward(problem, variant, threads).workspace_bytes();
}

void run_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace, Stream) {
  Backward(plan.problem, plan.variant, plan.grid).run(tensors, workspace);
}

}  // namespace flashtile::cpu
