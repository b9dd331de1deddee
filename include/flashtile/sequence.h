// Where the rows of each batch entry lie: side by side in a batch dimension, or one sequence behind the other.
#pragma once

#include <cstdint>

#include "flashtile/macros.h"

namespace flashtile {

/// Rows and columns of the scores of one batch entry.
struct Lengths {
  int q = 0;
  int k = 0;

  /// The column that row i meets on the diagonal; it may lie outside [0, k).
  FLASHTILE_HOST_DEVICE int diagonal(int row) const { return row + k - q; }
  FLASHTILE_HOST_DEVICE Lengths transposed() const { return {k, q}; }
  bool operator==(const Lengths&) const = default;
};

/// The rows of one batch entry, counted from the first of its tensor's. Those behind the used ones are its own too, but
/// do not count: as input they are never looked at, and results there are 0 (an lse −inf).
struct Span {
  int first = 0;
  int size = 0;
  int used = 0;
};

/// By bisection, the last of the indices 0 to count − 1 for which `holds`, which it does up to some index and not from
/// there on; 0 if it never does.
template <class Holds>
FLASHTILE_HOST_DEVICE int last_where(int count, Holds&& holds) {
  int low = 0, high = count;  // the answer lies in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

/// The rows of all batch entries on one side, queries or keys.
///
/// Dense: each entry has `size` rows of its own. Ragged: sequences stand one behind the other among `size` rows, and
/// entry b begins at `begins[b]` and ends at `begins[b + 1]`; what stands behind the last one's end belongs to it,
/// unused.
struct Spans {
  int batch = 0;
  int size = 0;
  const int* begins = nullptr;  // (batch + 1), or null: dense
  const int* used = nullptr;    // (batch), rows that count, or null: all of them

  FLASHTILE_HOST_DEVICE bool ragged() const { return begins != nullptr; }
  /// Where there are no sequences, the rows are unused ones of an empty sequence.
  FLASHTILE_HOST_DEVICE int entries() const { return ragged() && batch == 0 ? 1 : batch; }

  /// Lies inside the tensor, whatever the tables hold.
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

  /// Places for the tiles of `tile` rows of every entry: entry b has first_place(b) and those that follow, as many as
  /// its rows take, perhaps one more. No table need be read to know how many there are in all.
  FLASHTILE_HOST_DEVICE std::int64_t places(int tile) const {
    return ragged() ? size / tile + entries() : std::int64_t(batch) * tiles(size, tile);
  }
  FLASHTILE_HOST_DEVICE int first_place(int b, int first, int tile) const {
    return ragged() ? first / tile + b : b * tiles(size, tile);
  }

  /// The entry to which a place belongs: the last that begins at it or before.
  FLASHTILE_HOST_DEVICE int entry_of(int place, int tile) const {
    if (!ragged()) return place / tiles(size, tile);
    return last_where(batch, [&](int b) { return first_place(b, clamp(begins[b], 0, size), tile) <= place; });
  }

  FLASHTILE_HOST_DEVICE static int tiles(int rows, int tile) { return (rows + tile - 1) / tile; }

 private:
  FLASHTILE_HOST_DEVICE static int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
};

/// One batch entry.
struct Sequence {
  Span q, k;

  /// Of what counts: masks are aligned at the last used row and key.
  FLASHTILE_HOST_DEVICE Lengths lengths() const { return {q.used, k.used}; }
};

struct Sequences {
  Spans q, k;

  FLASHTILE_HOST_DEVICE Sequence at(int b) const { return {q.at(b), k.at(b)}; }
};

}  // namespace flashtile
