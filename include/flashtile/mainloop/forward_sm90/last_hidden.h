// This file hides from Hopper's forward kernel what a column mask of the last keys hides, as trees of drafts have it.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/mainloop/scores.h"

namespace flashtile {

/// LastHidden finds which keys of an edge block are hidden from the 16 rows of a warp, by the band, as they are behind
/// the last key, or by a column mask of the last keys (LastColumns).
template <int kColumns>
struct LastHidden : HiddenBits<kColumns> {
  /// Asks the block of the keys from `first_key` on for the warp's rows from `first_row` on.
  CUTE_DEVICE void find(ColumnsOfTile const& last, ScoreParams<HeadPacking> const& params, Lengths n, int first_key,
                        int first_row) {
    const int first_query = params.packing.queries_of(first_row);
    // A query has `heads` rows, so its first one is bit queries · heads. Bits of idle rows mean nothing, and a shift by
    // 32 or more leaves none.
    const auto from = [&](int query) {  // bits of the rows from those of a query on
      const int queries = min(max(query, first_query) - first_query, HeadPacking::kRows);
      return __funnelshift_lc(0u, ~0u, queries * params.packing.heads);
    };
    const auto bits_of = [&](Range queries) { return from(queries.begin) & ~from(queries.end); };
    this->find_by([&](int column) -> std::uint32_t {
      const int key = first_key + column;
      if (key >= n.k) return ~0u;
      std::uint32_t hidden = ~bits_of(params.mask.transposed().columns(key, n.transposed()));
      if (key >= last.first_key) {
        const HiddenRows rows = last.columns[key - last.first_key];
        hidden |= bits_of(rows.first) | bits_of(rows.second);
      }
      return hidden;
    });
  }
};

}  // namespace flashtile
