// This file says what a mask shows: of an element, and of whole blocks of them. Both answers come from here.
#pragma once

#include "flashtile/macros.h"
#include "flashtile/mask/band.h"
#include "flashtile/mask/walk.h"
#include "flashtile/range.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// Mask is all that hides scores. It is a value, which kernels take as a parameter.
struct Mask {
  Band band;
  // ALiBi counts from a diagonal that is so many columns ahead of the one on which the last row meets the last column:
  // not 0 where rows and columns are parts of a longer sequence, whose bands are told to `band` as they lie here.
  int ahead = 0;

  /// Returns the columns that `row` sees.
  FLASHTILE_HOST_DEVICE Range columns(int row, Lengths n) const { return band.columns(row, n); }

  /// Returns the column from which ALiBi counts the distances of `row`.
  FLASHTILE_HOST_DEVICE int origin(int row, Lengths n) const { return n.diagonal(row) + ahead; }

  /// Returns whether every row sees every column.
  FLASHTILE_HOST_DEVICE bool shows_all() const { return band == Band::full(); }

  /// Returns the mask of the same (row, column) pairs with rows and columns exchanged, for Lengths::transposed().
  FLASHTILE_HOST_DEVICE Mask transposed() const { return {band.transposed(), -ahead}; }

  /// Returns the walk of `rows`, a part of [0, n.q), over blocks of `width` columns.
  ///
  /// Both bounds of columns(i) grow with i, and bands of neighbouring rows touch, so the union over rows runs from the
  /// first row's begin to the last row's end, and the intersection from the last row's begin to the first's end.
  FLASHTILE_HOST_DEVICE BlockWalk walk(Range rows, int width, Lengths n) const {
    if (rows.empty()) return {};
    const Range first = columns(rows.begin, n);
    const Range last = columns(rows.end - 1, n);
    if (last.end <= first.begin) return {};
    BlockWalk walk{{first.begin / width, (last.end + width - 1) / width},
                   {(last.begin + width - 1) / width, first.end > 0 ? first.end / width : 0}};
    if (walk.interior.empty()) walk.interior = {walk.visible.begin, walk.visible.begin};
    return walk;
  }
};

/// VisibleKeys are the keys that a tile of query rows sees, in blocks of kN, which begin at the first of them.
///
/// Masks are aligned at the last key, so without the keys before that one the problem is the same with a shorter
/// seqlen_k: `lengths` and all block indices are those of the shorter problem.
template <int kN>
struct VisibleKeys {
  int first;  // first key of block 0, counted among all keys
  int count;  // keys from there up to the last visible one
  int blocks;
  Range interior;   // blocks that need no mask test
  Lengths lengths;  // all rows, and the keys from `first` on
  int turn = 0;     // the block that is visited first, before those that follow it and those before it

  VisibleKeys() = default;
  FLASHTILE_HOST_DEVICE VisibleKeys(Mask mask, Range rows, Lengths all)
      : VisibleKeys(mask, rows, all, mask.columns(rows.begin, all).begin) {}
  /// Begins the blocks at `first_key`, the first visible key or one before it.
  FLASHTILE_HOST_DEVICE VisibleKeys(Mask mask, Range rows, Lengths all, int first_key) : first(first_key) {
    lengths = {all.q, all.k - first};
    if (rows.empty()) {
      count = blocks = 0;
      return;
    }
    count = mask.columns(rows.end - 1, lengths).end;
    const BlockWalk blocks_seen = mask.walk(rows, kN, lengths);
    blocks = blocks_seen.end();
    interior = blocks_seen.interior;
  }
  /// Takes `keys` keys of `all` from key 0 on, in the blocks of `those`.
  FLASHTILE_HOST_DEVICE VisibleKeys(BlockWalk those, int keys, Lengths all)
      : first(0), count(keys), blocks(those.end()), interior(those.interior), lengths(all) {}

  FLASHTILE_HOST_DEVICE BlockWalk walk() const { return {{0, blocks}, interior}; }
  /// Keeps those of `those` blocks that there are.
  FLASHTILE_HOST_DEVICE void keep(Range those) {
    const auto within = [&](int block) { return block < 0 ? 0 : block < blocks ? block : blocks; };
    const int begin = within(those.begin);
    blocks = within(those.end) - begin;
    count = count - begin * kN < blocks * kN ? count - begin * kN : blocks * kN;
    first += begin * kN;
    lengths.k -= begin * kN;
    interior = {interior.begin > begin ? interior.begin - begin : 0,
                interior.end - begin < blocks ? interior.end - begin : blocks};
    if (interior.empty()) interior = {};
  }
  /// Keeps the n-th of `parts` runs of neighbouring blocks, the last of which may have fewer blocks, or none.
  FLASHTILE_HOST_DEVICE void keep_part(int n, int parts) {
    const int each = Spans::tiles(blocks, parts);
    keep({n * each, (n + 1) * each});
  }
  /// Visits first the block that holds the diagonal of `row`, or that is nearest to it.
  FLASHTILE_HOST_DEVICE void begin_at_diagonal(int row) {
    const int block = lengths.diagonal(row) / kN;
    turn = block >= blocks ? blocks - 1 : block;
    if (turn < 0) turn = 0;
  }
  /// Returns the block that is visited in a step, which counts from 0.
  FLASHTILE_HOST_DEVICE int visited(int step) const {
    const int block = step + turn;
    return block < blocks ? block : block - blocks;
  }
  /// Returns the first key of a block, counted among all keys.
  FLASHTILE_HOST_DEVICE int key(int block) const { return first + block * kN; }
};

}  // namespace flashtile
