// Where the keys and values of each sequence lie in a cache.
#pragma once

#include <cstdint>

#include "flashtile/cuda/divisor.h"

namespace flashtile {

/// The pages that hold the rows of each sequence. A contiguous cache has a page for each sequence, as long as it is.
struct Pages {
  const int* table = nullptr;     // (batch, of_sequence); null: sequence b has page b
  std::int64_t table_stride = 0;  // from one sequence to the next
  int of_sequence = 1;
  int pages = 0;  // that there are
  Divisor size;   // rows of each

  struct Place {
    int page;
    int row;  // of the page
  };

  /// Where a row of a sequence, from 0 up to of_sequence · size, lies: in a page that there is, whatever the table
  /// holds.
  FLASHTILE_HOST_DEVICE Place at(int b, int row) const {
    const int index = of_sequence == 1 ? 0 : size.quotient(row);
    int page = table == nullptr ? b : table[b * table_stride + index];
    page = page < 0 ? 0 : page >= pages ? pages - 1 : page;
    return {page, row - index * size.value};
  }
};

/// Which rows of a cache count, in each sequence.
struct CachedRows {
  int batch = 0;
  int capacity = 0;                   // rows that a sequence has room for
  const int* held = nullptr;          // (batch): those that it holds before anything is added
  const int* skipped = nullptr;       // (batch): rows at the beginning that do not count; null: none
  int added = 0;                      // rows that are added to each sequence; ragged: to all of them
  const int* added_begins = nullptr;  // (batch + 1): ragged, sequence b is given [b]..[b + 1] of them

  struct Rows {
    int begin = 0, held = 0, end = 0;  // counting rows are [begin, end), those added [held, end)
  };

  /// Inside the capacity, whatever the tables hold. What does not fit is not added. Where there are no sequences, the
  /// only entry (see Spans) has no rows.
  FLASHTILE_HOST_DEVICE Rows at(int b) const { return at(b, held_of(b)); }
  FLASHTILE_HOST_DEVICE int held_of(int b) const { return b < batch ? held[b] : 0; }

  /// The same where held_of(b) is known.
  FLASHTILE_HOST_DEVICE Rows at(int b, int held_of_b) const {
    Rows rows;
    if (b >= batch) return rows;
    rows.held = clamp(held_of_b, 0, capacity);
    rows.end = rows.held + clamp(added_to(b), 0, capacity - rows.held);
    rows.begin = skipped == nullptr ? 0 : clamp(skipped[b], 0, rows.end);
    return rows;
  }

 private:
  FLASHTILE_HOST_DEVICE int added_to(int b) const {
    if (added_begins == nullptr) return added;
    const int first = clamp(added_begins[b], 0, added);
    return clamp(added_begins[b + 1], first, added) - first;
  }
  FLASHTILE_HOST_DEVICE static int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
};

}  // namespace flashtile
