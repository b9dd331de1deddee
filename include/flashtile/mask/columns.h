// This file says which rows single columns are hidden from: the masks of FlashMask (arXiv 2410.01359), which hide from
// each column the rows of one interval or two.
#pragma once

#include <cstdint>

#include "flashtile/cuda/divisor.h"
#include "flashtile/macros.h"
#include "flashtile/mask/band.h"
#include "flashtile/mask/walk.h"
#include "flashtile/range.h"
#include "flashtile/sequence.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// HiddenRows are the rows that do not see a column, counted from the first row of the sequence: those of two ranges,
/// each of which may be empty. The ranges may meet, and reach beyond the rows that there are.
struct alignas(16) HiddenRows {
  Range first, second;

  FLASHTILE_HOST_DEVICE bool hides(int row) const { return first.contains(row) || second.contains(row); }

  /// Returns whether all of these rows are hidden, as none at all are.
  FLASHTILE_HOST_DEVICE bool hides_all(Range rows) const {
    // Each range may lead into the other, and the second back into the first, but from there on no row is hidden.
    int row = rows.begin;
    if (first.contains(row)) row = first.end;
    if (second.contains(row)) row = second.end;
    if (first.contains(row)) row = first.end;
    return row >= rows.end;
  }
  FLASHTILE_HOST_DEVICE bool hides_any(Range rows) const { return first.meets(rows) || second.meets(rows); }
};
static_assert(sizeof(HiddenRows) == 16);

/// HiddenBounds bound the HiddenRows of some columns: the least and the most begin and end of each of their ranges.
/// They say of most tiles what these see of the columns, without a question to each. An empty range counts as one that
/// begins behind all rows, and its end does not count.
struct alignas(16) HiddenBounds {
  struct Ends {
    int least, most;

    FLASHTILE_HOST_DEVICE void add(int end) {
      least = end < least ? end : least;
      most = end > most ? end : most;
    }
    FLASHTILE_HOST_DEVICE bool alike() const { return least == most; }
  };
  struct Ranges {
    Ends begin{kMost, kLeast}, end{kMost, kLeast};

    FLASHTILE_HOST_DEVICE void add(Range range) {
      begin.add(range.empty() ? kMost : range.begin);
      if (!range.empty()) end.add(range.end);
    }
    FLASHTILE_HOST_DEVICE bool empty() const { return begin.least == kMost; }
    /// Returns whether every range holds all of these rows, and whether none holds one, as far as the bounds say.
    FLASHTILE_HOST_DEVICE bool hide_all(Range rows) const { return begin.most <= rows.begin && end.least >= rows.end; }
    FLASHTILE_HOST_DEVICE bool hide_none(Range rows) const { return begin.least >= rows.end || end.most <= rows.begin; }
    /// Returns whether one of the ranges holds one of these rows, as far as the bounds say: the range that begins first
    /// holds all rows up to the least end, if there are such, and the one that ends last those from the last begin on.
    FLASHTILE_HOST_DEVICE bool hide_some(Range rows) const {
      if (empty()) return false;
      const Range from_first{begin.least, end.least > begin.least ? end.least : begin.least + 1};
      const Range to_last{begin.most < end.most ? begin.most : end.most - 1, end.most};
      return from_first.meets(rows) || to_last.meets(rows);
    }
    /// Returns whether one of these rows is in no range, and outside one of the `others`, as far as the bounds say: it
    /// is outside the one of them that begins last if it comes before that, or the one that ends first if behind that.
    FLASHTILE_HOST_DEVICE bool show_some(Range rows, const Ranges& others) const {
      const Range before{kLeast, begin.least}, behind{end.most, kMost};
      const Range before_other{kLeast, others.begin.most}, behind_other{others.end.least, kMost};
      return before.meets(rows & before_other) || before.meets(rows & behind_other) ||
             behind.meets(rows & before_other) || behind.meets(rows & behind_other);
    }
    FLASHTILE_HOST_DEVICE bool alike() const { return begin.alike() && (end.alike() || empty()); }
    FLASHTILE_HOST_DEVICE Range any() const { return {begin.least, end.most}; }  // each, where all are alike
  };
  static constexpr int kLeast = -0x7fffffff - 1, kMost = 0x7fffffff;
  Ranges first, second;

  FLASHTILE_HOST_DEVICE void add(const HiddenRows& hidden) { first.add(hidden.first), second.add(hidden.second); }
};
static_assert(sizeof(HiddenBounds) == 32);

/// ColumnRanges are the HiddenRows of each column of all heads, in the caller's memory, or none. Those of a ragged
/// batch lie one sequence behind the other, as the rows of its keys do.
struct ColumnRanges {
  const HiddenRows* data = nullptr;
  std::int64_t batch_stride = 0;  // 0 where all entries have the same
  std::int64_t head_stride = 0;
  Divisor heads;  // query heads that share them

  /// Returns those of a tensor (B or 1, H, S_k, 4), or none if it is not given.
  static ColumnRanges of(const TensorView& t, int heads_q) {
    if (!t.given()) return {};
    const int heads = static_cast<int>(t.shape[1]);
    return {static_cast<const HiddenRows*>(t.data), t.shape[0] == 1 ? 0 : t.strides[0] / 4, t.strides[1] / 4,
            Divisor(heads_q / heads)};
  }

  FLASHTILE_HOST_DEVICE bool given() const { return data != nullptr; }
  /// Returns which mask, of those that a batch entry has, is that of a query head.
  FLASHTILE_HOST_DEVICE int mask_of(int head) const { return heads.quotient(head); }
  /// Returns those of a mask, from the first column of its batch entry on; `k` says where that lies.
  FLASHTILE_HOST_DEVICE const HiddenRows* of_mask(int batch, int mask, Span k) const {
    return data + batch * batch_stride + mask * head_stride + k.first;
  }
  FLASHTILE_HOST_DEVICE const HiddenRows* of_head(int batch, int head, Span k) const {
    return of_mask(batch, mask_of(head), k);
  }
};

/// SeenColumn is what one column adds to the question which kind of block a block of columns is (see BlockKind).
struct SeenColumn {
  bool shown = false;   // whether a row of the tile sees it,
  bool hidden = false;  // and whether one does not

  FLASHTILE_HOST_DEVICE static SeenColumn of(const HiddenRows& hidden, int column, Range rows, Band band, Lengths n) {
    const Range inside = band.transposed().columns(column, n.transposed());
    const Range seen = inside & rows;
    if (seen.empty()) return {false, true};
    return {!hidden.hides_all(seen), seen != rows || hidden.hides_any(rows)};
  }
  FLASHTILE_HOST_DEVICE SeenColumn operator|(SeenColumn other) const {
    return {shown || other.shown, hidden || other.hidden};
  }
  FLASHTILE_HOST_DEVICE BlockKind kind() const {
    return !shown ? BlockKind::kSkip : hidden ? BlockKind::kEdge : BlockKind::kInterior;
  }
};

/// LastColumns are `count` ColumnRanges, which the last columns of each sequence have, whatever its length: those
/// before have none. Where a sequence is shorter, the first ranges are no column's.
struct LastColumns {
  ColumnRanges ranges;
  int count = 0;

  /// Returns the first column, of a sequence or a part that ends with it, that has ranges: `columns` if none does.
  FLASHTILE_HOST_DEVICE int first(int columns) const { return columns > count ? columns - count : 0; }
  /// Returns the ranges of a mask from that column on.
  FLASHTILE_HOST_DEVICE const HiddenRows* of_mask(int batch, int mask, int columns) const {
    return ranges.of_mask(batch, mask, {}) + (columns < count ? count - columns : 0);
  }
};

/// Returns what `rows`, which are not empty, see of a block of columns: exactly, as each column is asked. `columns` are
/// those of the block.
FLASHTILE_HOST_DEVICE BlockKind kind_of_block(const HiddenRows* columns, Range block, Range rows, Band band,
                                              Lengths n) {
  SeenColumn seen;
  for (int column = block.begin; column < block.end; ++column)
    seen = seen | SeenColumn::of(columns[column - block.begin], column, rows, band, n);
  return seen.kind();
}

/// KindByBounds is what bounds say of a block's kind: if it is not certain, the block's columns have to be asked.
struct KindByBounds {
  BlockKind kind = BlockKind::kEdge;
  bool certain = false;
};

/// Returns what the bounds of a block of columns say of its kind for `rows`, which are not empty.
FLASHTILE_HOST_DEVICE KindByBounds kind_by_bounds(const HiddenBounds& bounds, Range block, Range rows, Band band,
                                                  Lengths n) {
  // Both ends of what a row sees of the band grow with the row.
  const Range first = band.columns(rows.begin, n), last = band.columns(rows.end - 1, n);
  const bool outside = last.end <= block.begin || first.begin >= block.end;
  const auto& [one, other] = bounds;
  if (outside || one.hide_all(rows) || other.hide_all(rows)) return {BlockKind::kSkip, true};
  if (last.begin > block.begin || first.end < block.end) return {};
  if (one.hide_none(rows) && other.hide_none(rows)) return {BlockKind::kInterior, true};
  if (one.alike() && other.alike()) {
    const HiddenRows each{one.any(), other.any()};
    return {SeenColumn{!each.hides_all(rows), each.hides_any(rows)}.kind(), true};
  }
  const bool hidden = one.hide_some(rows) || other.hide_some(rows);
  return {BlockKind::kEdge, hidden && (one.show_some(rows, other) || other.show_some(rows, one))};
}

}  // namespace flashtile
