// Backward. Every gradient element belongs to one work item, which adds its tiles in one order: results do not depend
// on the number of threads.
//
// Fused: an item is a (batch, KV head) and makes dQ, dK and dV from one pass of five matmuls a tile, dQ in a float32
// accumulator of all its queries. Where that leaves threads idle, two passes of smaller items share the work instead:
// one item per tile of keys makes dK and dV, one per block of queries makes dQ, with seven matmuls a tile in all.
#include <algorithm>
#include <cmath>

#include "cpu.h"
#include "dispatch.h"
#include "flashtile/math/softmax.h"
#include "flashtile/math/state.h"
#include "parallel.h"
#include "tiling.h"

namespace flashtile::cpu {
namespace {

int tile_count(int length, int tile) {
  return (length + tile - 1) / tile;
}

struct ThreadMemory {
  BackwardBuffers buffers;
  TileBuffers tile;
  float* dq;  // (queries, D) of the item
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

/// Of every query row, (B, H_q, rows in whole blocks).
struct RowStatistics {
  float* lse_log2;
  float* delta;
};

/// One backward call: what its work items share.
class Backward {
 public:
  Backward(const Problem& problem, const Variant& variant, int grid)
      : problem_(problem),
        sizes_(tile_sizes(problem, variant)),
        threads_(grid),
        key_tiles_(tile_count(problem.seqlen_k, sizes_.tile_n)),
        query_blocks_(tile_count(problem.seqlen_q, sizes_.tile_m)),
        row_stride_(static_cast<std::int64_t>(query_blocks_) * sizes_.tile_m) {
    const std::int64_t items = std::int64_t{problem.batch} * problem.heads_k;
    const std::int64_t rounds = (items + threads_ - 1) / threads_;
    fused_ = 5 * rounds * threads_ <= 7 * items;
  }

  std::int64_t workspace_bytes() const {
    Arena shared, own;
    divide_shared(shared);
    divide_own(own);
    return shared.bytes() + threads_ * own.bytes();
  }

  void run(const BackwardTensors& tensors, void* workspace) {
    tensors_ = &tensors;
    kernel_ = &kernels(problem_.dtype);
    Arena shared(workspace), own;
    rows_ = divide_shared(shared);
    divide_own(own);
    thread_memory_ = static_cast<std::byte*>(workspace) + shared.bytes();
    thread_bytes_ = own.bytes();

    parallel_for(threads_, std::int64_t{problem_.batch} * problem_.heads_q, [this](int, std::int64_t item) {
      fill_rows(static_cast<int>(item / problem_.heads_q), static_cast<int>(item % problem_.heads_q));
    });
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
  std::int64_t dq_rows() const { return fused_ ? problem_.group() * row_stride_ : sizes_.tile_m; }
  std::int64_t dq_stride() const { return round_up(problem_.head_dim, kLanePadding); }

  RowStatistics divide_shared(Arena& arena) const {
    const std::int64_t rows = std::int64_t{problem_.batch} * problem_.heads_q * row_stride_;
    return {arena.take(rows), arena.take(rows)};
  }

  ThreadMemory divide_own(Arena& arena) const { return divide(arena, sizes_, dq_rows(), problem_.dropout.active()); }

  ThreadMemory memory_of(int thread) const {
    Arena arena(thread_memory_ + thread * thread_bytes_);
    return divide_own(arena);
  }

  std::int64_t first_row(int batch, int head) const {
    return (std::int64_t{batch} * problem_.heads_q + head) * row_stride_;
  }

  /// lse in the log2 domain and delta = rowsum(dO∘O) − dlse. Where a row sees nothing, and past the last row, an
  /// lse of +inf makes every probability 0.
  void fill_rows(int batch, int head) const {
    float* const lse_log2 = rows_.lse_log2 + first_row(batch, head);
    float* const delta = rows_.delta + first_row(batch, head);
    const std::int64_t at = (std::int64_t{batch} * problem_.heads_q + head) * problem_.seqlen_q;
    const float* const lse = static_cast<const float*>(tensors_->forward.lse.data) + at;
    kernel_->row_dots(delta, head_rows(tensors_->dout, batch, head, 0),
                      head_rows(tensors_->forward.out, batch, head, 0), problem_.seqlen_q, problem_.head_dim_v);
    for (int i = 0; i < problem_.seqlen_q; ++i) {
      lse_log2[i] = lse[i] == -kInfinity ? kInfinity : lse[i] * kLog2e;
      if (tensors_->dlse.given()) delta[i] -= static_cast<const float*>(tensors_->dlse.data)[at + i];
    }
    for (std::int64_t i = problem_.seqlen_q; i < row_stride_; ++i) {
      lse_log2[i] = kInfinity;
      delta[i] = 0;
    }
  }

  /// Σ over rows of −P·delta, P being the weight that the sink takes; its value is 0. In double, for its length.
  void run_sinks() const {
    parallel_for(threads_, problem_.heads_q, [this](int, std::int64_t head) {
      const double sink_log2 = static_cast<const float*>(tensors_->forward.sinks.data)[head] * double{kLog2e};
      double sum = 0;
      for (int batch = 0; batch < problem_.batch; ++batch) {
        const std::int64_t first = first_row(batch, static_cast<int>(head));
        for (std::int64_t i = first; i < first + problem_.seqlen_q; ++i)
          sum -= std::exp2(sink_log2 - rows_.lse_log2[i]) * rows_.delta[i];
      }
      static_cast<float*>(tensors_->dsinks.data)[head] = static_cast<float>(sum);
    });
  }

  void load_keys(const ThreadMemory& memory, int batch, int head_k, Range keys) const {
    kernel_->load_keys(sizes_, memory.buffers, keys.end - keys.begin,
                       head_rows(tensors_->forward.k, batch, head_k, keys.begin),
                       head_rows(tensors_->forward.v, batch, head_k, keys.begin));
  }

  void load_queries(const ThreadMemory& memory, int batch, int head, Range queries) const {
    kernel_->load_queries(sizes_, memory.buffers, queries.end - queries.begin,
                          head_rows(tensors_->forward.q, batch, head, queries.begin),
                          head_rows(tensors_->dout, batch, head, queries.begin));
  }

  /// One tile, its rows loaded; `dq` is the accumulator of its queries.
  void run_tile(const ThreadMemory& memory, Wanted wanted, const TileRows& rows, bool edge, float* dq) const {
    const std::int64_t first = first_row(rows.batch, rows.head) + rows.queries.begin;
    kernel_->backward_tile({.sizes = sizes_,
                            .scores = head_scores(problem_, tensors_->forward.alibi_slopes, rows.batch, rows.head),
                            .wanted = wanted,
                            .tile = make_tile(problem_, sizes_, rows, edge, memory.tile),
                            .lse_log2 = rows_.lse_log2 + first,
                            .delta = rows_.delta + first,
                            .dq = dq,
                            .buffers = memory.buffers});
  }

  /// dK and dV of one tile of keys, from every query that sees it; adds to dQ (of the group's heads) where wanted.
  void run_key_tile(const ThreadMemory& memory, Wanted wanted, int batch, int head_k, int index) const {
    const Range keys = tile_range(index, sizes_.tile_n, problem_.seqlen_k);
    const int count = keys.end - keys.begin;
    std::fill_n(memory.buffers.dk, sizes_.tile_n * dq_stride(), 0.0f);
    std::fill_n(memory.buffers.dv, sizes_.tile_n * round_up(problem_.head_dim_v, kLanePadding), 0.0f);
    const TileRanges blocks =
        problem_.seqlen_q == 0 ? TileRanges{}
                               : problem_.band.transposed().tiles(keys, sizes_.tile_m, problem_.lengths().transposed());
    if (!blocks.visible.empty()) load_keys(memory, batch, head_k, keys);
    for (int member = 0; member < problem_.group(); ++member) {
      const int head = head_k * problem_.group() + member;
      for (int i = blocks.visible.begin; i < blocks.visible.end; ++i) {
        const Range queries = tile_range(i, sizes_.tile_m, problem_.seqlen_q);
        load_queries(memory, batch, head, queries);
        run_tile(memory, wanted, {batch, head, queries, keys}, !blocks.interior.contains(i),
                 wanted.dq ? memory.dq + (member * row_stride_ + queries.begin) * dq_stride() : nullptr);
      }
    }
    if (wanted.dk) {
      kernel_->store_rows(head_rows(tensors_->dk, batch, head_k, keys.begin), memory.buffers.dk, count,
                          problem_.head_dim, problem_.scale);
    }
    if (wanted.dv) {
      kernel_->store_rows(head_rows(tensors_->dv, batch, head_k, keys.begin), memory.buffers.dv, count,
                          problem_.head_dim_v, 1.0f);
    }
  }

  void run_fused(Wanted wanted) const {
    parallel_for(threads_, std::int64_t{problem_.batch} * problem_.heads_k, [&](int thread, std::int64_t item) {
      const ThreadMemory memory = memory_of(thread);
      const int batch = static_cast<int>(item / problem_.heads_k), head_k = static_cast<int>(item % problem_.heads_k);
      std::fill_n(memory.dq, dq_rows() * dq_stride(), 0.0f);
      for (int index = 0; index < key_tiles_; ++index) run_key_tile(memory, wanted, batch, head_k, index);
      for (int member = 0; member < problem_.group(); ++member) {
        kernel_->store_rows(head_rows(tensors_->dq, batch, head_k * problem_.group() + member, 0),
                            memory.dq + member * row_stride_ * dq_stride(), problem_.seqlen_q, problem_.head_dim,
                            problem_.scale);
      }
    });
  }

  void run_keys(Wanted wanted) const {
    const std::int64_t items = std::int64_t{problem_.batch} * problem_.heads_k * key_tiles_;
    parallel_for(threads_, items, [&](int thread, std::int64_t item) {
      // Under a causal mask the first tile is seen by most queries: the longest first.
      const int index = static_cast<int>(item % key_tiles_);
      const std::int64_t head = item / key_tiles_;
      run_key_tile(memory_of(thread), wanted, static_cast<int>(head / problem_.heads_k),
                   static_cast<int>(head % problem_.heads_k), index);
    });
  }

  /// dQ of one block of queries, from every key it sees.
  void run_query_block(const ThreadMemory& memory, int batch, int head, int index) const {
    const Range queries = tile_range(index, sizes_.tile_m, problem_.seqlen_q);
    const int head_k = head / problem_.group();
    std::fill_n(memory.dq, sizes_.tile_m * dq_stride(), 0.0f);
    const TileRanges tiles = problem_.band.tiles(queries, sizes_.tile_n, problem_.lengths());
    if (!tiles.visible.empty()) load_queries(memory, batch, head, queries);
    for (int i = tiles.visible.begin; i < tiles.visible.end; ++i) {
      const Range keys = tile_range(i, sizes_.tile_n, problem_.seqlen_k);
      load_keys(memory, batch, head_k, keys);
      run_tile(memory, {.dq = true, .dk = false, .dv = false}, {batch, head, queries, keys},
               !tiles.interior.contains(i), memory.dq);
    }
    kernel_->store_rows(head_rows(tensors_->dq, batch, head, queries.begin), memory.dq, queries.end - queries.begin,
                        problem_.head_dim, problem_.scale);
  }

  void run_queries() const {
    const std::int64_t items = std::int64_t{problem_.batch} * problem_.heads_q * query_blocks_;
    parallel_for(threads_, items, [&](int thread, std::int64_t item) {
      const int index = query_blocks_ - 1 - static_cast<int>(item % query_blocks_);
      const std::int64_t head = item / query_blocks_;
      run_query_block(memory_of(thread), static_cast<int>(head / problem_.heads_q),
                      static_cast<int>(head % problem_.heads_q), index);
    });
  }

  Problem problem_;
  Sizes sizes_;
  int threads_;
  int key_tiles_;
  int query_blocks_;
  std::int64_t row_stride_;  // rows of a head, in whole blocks
  bool fused_ = false;

  const BackwardTensors* tensors_ = nullptr;
  RowStatistics rows_{};
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
