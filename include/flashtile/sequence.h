// This file says where the rows of each batch entry lie: in a batch dimension (dense), or concatenated (ragged).
#pragma once

#include <cstdint>

#include "flashtile/macros.h"

namespace flashtile {

/// These are the rows and columns of the scores of one batch entry.
struct Lengths {
  int q = 0;
  int k = 0;

  /// Returns the column that row i meets on the diagonal; it may lie outside [0, k).
  FLASHTILE_HOST_DEVICE int diagonal(int row) const { return row + k - q; }
  FLASHTILE_HOST_DEVICE Lengths transposed() const { return {k, q}; }
  bool operator==(const Lengths&) const = default;
};

/// A span is the rows of one batch entry, counted from the first row of the tensor. Rows after the used ones belong to
/// the entry too, but do not count: they are never read as input, and results there are 0 (an lse −inf).
struct Span {
  int first = 0;
  int size = 0;
  int used = 0;
};

/// Finds by bisection the last of the indices 0 to count − 1 for which `holds` is true, given that it is true up to
/// some index and false after it. Returns 0 if it is never true.
template <class Holds>
FLASHTILE_HOST_DEVICE int last_where(int count, Holds&& holds) {
  int low = 0, high = count;  // the answer lies in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

/// These are the rows of all batch entries on one side, queries or keys.
///
/// In a dense batch each entry has `size` rows of its own. In a ragged one the sequences are concatenated in `size`
/// rows: entry b begins at `begins[b]` and ends at `begins[b + 1]`, and rows after the end of the last entry belong to
/// it, unused.
struct Spans {
  int batch = 0;
  int size = 0;
  const int* begins = nullptr;  // (batch + 1), or null: the batch is dense
  const int* used = nullptr;    // (batch), rows of each entry that count, or null: all of them

  FLASHTILE_HOST_DEVICE bool ragged() const { return begins != nullptr; }
  /// A ragged batch of no sequences has one entry: an empty sequence, to which all rows belong, unused.
  FLASHTILE_HOST_DEVICE int entries() const { return ragged() && batch == 0 ? 1 : batch; }

  /// Returns a span that lies inside the tensor, whatever the tables hold.
  FLASHTILE_HOST_DEVICE Span at(int b) const {
    Span span{0, size, size};
    if (ragged() && batch == 0) return {0, size, 0};
    if (ragged()) {
      span.first = clamp(begins[b], 0, size);
      const int end = clamp(begins[b + 1], span.first, size);
      span.size = (b + 1 == batch ? size : end) - span.first;
      span.used = end - span.first;
    }
    if (used != nullptr) span.used = clamp(used[b], 0, span.used);
    return span;
  }

  /// Slots number the tiles, of `tile` rows each, of all entries in one line: in a list, or in the workspace. Entry b
  /// has first_place(b) and the slots that follow, as many as its rows need, perhaps one more. So their number in all
  /// follows from `size` and `batch`, and the host, which does not know a ragged batch's lengths, can allocate them.
  FLASHTILE_HOST_DEVICE std::int64_t places(int tile) const {
    return ragged() ? size / tile + entries() : std::int64_t(batch) * tiles(size, tile);
  }
  FLASHTILE_HOST_DEVICE int first_place(int b, int first, int tile) const {
    return ragged() ? first / tile + b : b * tiles(size, tile);
  }

  /// Returns the entry to which a slot belongs: the last entry whose first slot is not after it.
  FLASHTILE_HOST_DEVICE int entry_of(int place, int tile) const {
    if (!ragged()) return place / tiles(size, tile);
    return last_where(batch, [&](int b) { return first_place(b, clamp(begins[b], 0, size), tile) <= place; });
  }

  FLASHTILE_HOST_DEVICE static int tiles(int rows, int tile) { return (rows + tile - 1) / tile; }

 private:
  FLASHTILE_HOST_DEVICE static int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
};

/// These are the queries and keys of one batch entry.
struct Sequence {
  Span q, k;

  /// Returns the lengths that count: masks are aligned at the last used row and key.
  FLASHTILE_HOST_DEVICE Lengths lengths() const { return {q.used, k.used}; }
};

struct Sequences {
  Spans q, k;

  FLASHTILE_HOST_DEVICE Sequence at(int b) const { return {q.at(b), k.at(b)}; }
};

}  // namespace flashtile
