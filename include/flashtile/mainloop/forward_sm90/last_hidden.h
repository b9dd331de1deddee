// This file hides from Hopper's forward kernel what a column mask of the last keys hides, as trees of drafts have it.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// LastHidden finds which keys of an edge block are hidden from the 16 rows of a warp, by the band and by a column mask
/// of the last keys (LastColumns), and sets their scores to −inf. Lane l looks up keys 2 · l and 2 · l + 1 of every 64
/// and keeps a word for them: bit r says that row r does not see the first, bit 16 + r the second. A thread has scores
/// of other keys, so hide() reads the words of the lanes that looked these up, by shuffles.
template <int kColumns>
struct LastHidden {
  static constexpr int kRows = HeadPacking::kRows, kAtOnce = 64, kChunks = (kColumns + kAtOnce - 1) / kAtOnce;
  std::uint32_t words[kChunks];

  /// Asks the block of the keys from `first_key` on for the warp's rows from `first_row` on.
  CUTE_DEVICE void find(ColumnsOfTile const& last, ScoreParams<HeadPacking> const& params, Lengths n, int first_key,
                        int first_row) {
    constexpr std::uint32_t kAll = (1u << kRows) - 1;
    const int first_query = params.packing.queries_of(first_row);
    // A query has `heads` rows, so its first one is bit queries · heads. Bits of idle rows mean nothing, and a shift by
    // 32 or more leaves none.
    const auto from = [&](int query) {  // bits of the rows from those of a query on
      const int queries = min(max(query, first_query) - first_query, kRows);
      return __funnelshift_lc(0u, ~0u, queries * params.packing.heads);
    };
    const auto bits_of = [&](Range queries) { return from(queries.begin) & ~from(queries.end); };
    const auto hidden_at = [&](int key) -> std::uint32_t {
      if (key >= n.k) return kAll;
      std::uint32_t hidden = ~bits_of(params.mask.transposed().columns(key, n.transposed()));
      if (key >= last.first_key) {
        const HiddenRows rows = last.columns[key - last.first_key];
        hidden |= bits_of(rows.first) | bits_of(rows.second);
      }
      return hidden & kAll;
    };
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int key = first_key + kAtOnce * chunk + 2 * int(threadIdx.x % 32);
      words[chunk] = hidden_at(key) | hidden_at(key + 1) << kRows;
    }
  }

  /// Hides them from a thread's scores, two columns of every eight in each of two rows. The words are those of the
  /// lanes that have these columns.
  template <class Scores>
  CUTE_DEVICE void hide(Scores& scores) const {
    using namespace cute;
    static_assert(size<0>(decltype(scores.layout()){}) == 2 && 4 * size<1>(decltype(scores.layout()){}) == kColumns);
    const int lane = int(threadIdx.x % 32);
    CUTE_UNROLL
    for (int column = 0; column < kColumns; column += 8) {
      const int lane_of_columns = column % kAtOnce / 2 + lane % 4;
      const std::uint32_t bits = __shfl_sync(0xffffffff, words[column / kAtOnce], lane_of_columns) >> lane / 4;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r)
          if (bits & (1u << (kRows * i + 8 * r))) scores(r, column / 4 + i) = -kInfinity;
      }
    }
  }
};

}  // namespace flashtile
