// This file says where the keys and values of each sequence lie in a cache.
#pragma once

#include <cstdint>

#include "flashtile/cuda/divisor.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// These pages hold the rows of each sequence. A contiguous cache counts as one page per sequence, as long as its
/// capacity.
struct Pages {
  const int* table = nullptr;     // (batch, of_sequence), page numbers; null: sequence b has page b
  std::int64_t table_stride = 0;  // from one row of the table to the next
  int of_sequence = 1;
  int pages = 0;  // in the whole cache
  Divisor size;   // rows of a page

  struct Place {
    int page;
    int row;  // within the page
  };

  /// Returns where a row of a sequence lies, for rows from 0 up to of_sequence · size. The page is clamped to those
  /// that exist, whatever the table holds, so that no kernel leaves the cache.
  FLASHTILE_HOST_DEVICE Place at(int b, int row) const { return existing(entry(b, row)); }

  /// Returns the same, with what the table holds. Who does not yet need existing() of it does not wait for memory.
  FLASHTILE_HOST_DEVICE Place entry(int b, int row) const {
    const int index = index_of(row);
    return {table == nullptr ? b : *place_in_table(b, index), row - index * size.value};
  }
  FLASHTILE_HOST_DEVICE Place existing(Place place) const {
    return {place.page < 0 ? 0 : place.page >= pages ? pages - 1 : place.page, place.row};
  }

  FLASHTILE_HOST_DEVICE int index_of(int row) const { return of_sequence == 1 ? 0 : size.quotient(row); }
  FLASHTILE_HOST_DEVICE const int* place_in_table(int b, int index) const { return table + b * table_stride + index; }
};

/// These are what numbers of 8 bits in a cache are multiplied with: one factor for all, one for each sequence and KV
/// head, or one for each row and KV head.
struct CacheDescales {
  float* data = nullptr;                                   // null: 1 for all
  std::int64_t sequence = 0, page = 0, row = 0, head = 0;  // strides
  bool of_rows = false;

  /// `t` is (), (1), (B, H_k), (B_cache, S_cache, H_k) or (pages, page_size, H_k), if it is given.
  static CacheDescales of(const TensorView& t) {
    CacheDescales descales;
    if (!t.given()) return descales;
    descales.data = static_cast<float*>(t.data);
    if (t.rank == 2) descales.sequence = t.strides[0], descales.head = t.strides[1];
    if (t.rank == 3)
      descales.page = t.strides[0], descales.row = t.strides[1], descales.head = t.strides[2], descales.of_rows = true;
    return descales;
  }

  FLASHTILE_HOST_DEVICE float* at(int sequence_index, int head_index, Pages::Place place) const {
    return data + sequence_index * sequence + place.page * page + place.row * row + head_index * head;
  }
  FLASHTILE_HOST_DEVICE float of(int sequence_index, int head_index, Pages::Place place) const {
    return data == nullptr ? 1 : *at(sequence_index, head_index, place);
  }
};

/// This says which rows of a cache count in each sequence, and which of them a call adds.
struct CachedRows {
  int batch = 0;
  int capacity = 0;                   // rows that a sequence has room for
  const int* held = nullptr;          // (batch): rows that each sequence holds before anything is added
  const int* skipped = nullptr;       // (batch): rows at the beginning that do not count (left padding); null: none
  int added = 0;                      // rows that are added to each sequence; of a ragged batch, to all together
  const int* added_begins = nullptr;  // (batch + 1): of a ragged batch, rows [b]..[b + 1] go to sequence b

  struct Rows {
    int begin = 0, held = 0, end = 0;  // rows [begin, end) count; rows [held, end) are added

    FLASHTILE_HOST_DEVICE int count() const { return end - begin; }
  };

  /// Returns rows that lie inside the capacity, whatever the tables hold. New rows that do not fit are not added. A
  /// batch of no sequences has one entry all the same (see Spans), which has no rows.
  FLASHTILE_HOST_DEVICE Rows at(int b) const { return at(b, held_of(b)); }
  FLASHTILE_HOST_DEVICE int held_of(int b) const { return b < batch ? held[b] : 0; }

  /// Returns the same, for callers that have loaded held_of(b) already.
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
