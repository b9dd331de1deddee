// This file says which of a thread's weights dropout removes, on tiles of scores in registers.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/dropout.h"

namespace flashtile {

/// Rows says which side of a tile of scores its rows are.
enum class Rows { kQueries, kKeys };

/// Repeats the top bits of bytes, 0 to 3 of `low` and 4 to 7 of `high`, eight times each. Hexadecimal digit i of
/// kBytes, from the last on, says whose becomes byte i.
template <std::uint32_t kBytes>
CUTE_DEVICE std::uint32_t repeat_top_bits(std::uint32_t low, std::uint32_t high) {
  std::uint32_t repeated;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(repeated) : "r"(low), "r"(high), "n"(kBytes | 0x8888));
  return repeated;
}

/// Kept says which of a thread's weights stay in rows r = 0 and 1, which lie 8 apart, and in columns c = 0, 1 and, with
/// kColumns = 4, 2 and 3, which lie 8 further on. They share one Philox. Answers are masks, of all ones where a weight
/// stays.
template <Rows kSide, int kColumns>
struct Kept {
  std::uint32_t of_even, of_odd;  // the top bit of each byte is that of a weight, in even and in odd columns

  /// Returns a mask for a word of two weights of 16 bits, those of columns c, which is even, and c + 1.
  template <int r, int c>
  CUTE_DEVICE std::uint32_t pair() const {
    return repeat_top_bits<0x4400 + 0x1111 * byte_of(r, c)>(of_even, of_odd);
  }
  /// Returns a mask for a value of 32 bits.
  template <int r, int c>
  CUTE_DEVICE std::uint32_t one() const {
    const std::uint32_t word = c % 2 == 0 ? of_even : of_odd;
    return repeat_top_bits<0x1111 * byte_of(r, c)>(word, word);
  }

  /// Sets dropped values (row, column) to 0, of which the first is at (row, column).
  template <class Values>
  CUTE_DEVICE void keep(Values& values, int row, int column) const {
    for_each([&](auto r, auto c) {
      float& value = values(row + r, column + c);
      value = __uint_as_float(__float_as_uint(value) & one<r, c>());
    });
  }
  /// Makes dropped weights negative: weights never are, so the sign tells who takes them next which were dropped.
  template <class Values>
  CUTE_DEVICE void mark(Values& weights, int row, int column) const {
    for_each([&](auto r, auto c) {
      float& weight = weights(row + r, column + c);
      weight = __uint_as_float(__float_as_uint(weight) | (~one<r, c>() & 0x80000000));
    });
  }
  /// Does the same in `words`, each of which is two weights of 16 bits, as a matmul has them: two columns of row 0, of
  /// row 1, … The first is at `column` of row 0.
  template <class Words>
  CUTE_DEVICE void keep_words(Words& words, int column) const {
    for_each_pair([&](auto r, auto c) { words(column + c + r) &= pair<r, c>(); });
  }
  template <class Words>
  CUTE_DEVICE void mark_words(Words& words, int column) const {
    for_each_pair([&](auto r, auto c) { words(column + c + r) |= ~pair<r, c>() & 0x80008000; });
  }

 private:
  /// Returns where in a word the byte of row r and column c is; where kColumns = 2, DropoutTile has shifted it there.
  static constexpr int byte_of(int r, int c) {
    const int row = 8 * r, column = c / 2 * 8;
    return kSide == Rows::kKeys ? Dropout::byte_of(column, row) : Dropout::byte_of(row, column);
  }
  template <class Visit>
  CUTE_DEVICE static void for_each(Visit&& visit) {
    for_each_pair([&](auto r, auto c) {
      visit(r, c);
      visit(r, cute::Int<c + 1>{});
    });
  }
  template <class Visit>
  CUTE_DEVICE static void for_each_pair(Visit&& visit) {
    using namespace cute;
    cute::for_each(make_int_sequence<2>{}, [&](auto r) {
      cute::for_each(make_int_sequence<kColumns / 2>{}, [&](auto i) { visit(r, Int<2 * i>{}); });
    });
  }
};

/// Sets a weight to 0 in `word`, of two, where that of `marked` is marked.
CUTE_DEVICE std::uint32_t drop_marked(std::uint32_t word, std::uint32_t marked) {
  return word & ~repeat_top_bits<0x3311>(marked, marked);
}
/// Returns 0 where weight i of `marked` is marked, else `value`.
template <int i>
CUTE_DEVICE float keep_unmarked(float value, std::uint32_t marked) {
  return __uint_as_float(__float_as_uint(value) & ~repeat_top_bits<i == 0 ? 0x1111 : 0x3333>(marked, marked));
}

/// DropoutTile says which weights of a tile stay, of one thread, which has two columns of every kColumnStep. The tile
/// begins at `first_row` and `first_column`, multiples of 16.
///
/// A thread's rows and its neighbour's, four lanes away, differ in bit 0, so each needs half of the words of the same
/// Philox. They take turns: of two neighbouring sets of columns each makes one, and gives the other half away.
template <Rows kSide, int kColumnStep = 8>
struct DropoutTile {
  static constexpr int kColumns = kColumnStep == 8 ? 4 : 2;  // a thread's columns that share words
  static constexpr int kStep = kColumns / 2 * kColumnStep;   // from these columns to the next
  static_assert(kColumnStep == 8 || kColumnStep == 16 || kColumnStep == 32);
  using Columns = Kept<kSide, kColumns>;

  Dropout const& dropout;
  int batch, head, first_row, first_column;
  BytesAtLeast kept{dropout.drop_below};

  CUTE_DEVICE DropoutTile(Dropout const& dropout, int batch, int head, int first_row, int first_column)
      : dropout(dropout), batch(batch), head(head), first_row(first_row), first_column(first_column) {
    // The asm hides the value from the compiler, which would begin the words of all tiles of these rows ahead of their
    // loop, and hold what it knows of them in scarce registers.
    asm volatile("" : "+r"(this->first_row));
  }

  /// Returns what stays in a thread's rows r and r + 1, and in its columns from c on: the first kColumns of them, and
  /// as many more. `coord` has the coordinates in the tile. All threads of a warp call it at once.
  template <class Coord>
  CUTE_DEVICE cute::array<Columns, 2> at(Coord const& coord, int r, int c) const {
    using namespace cute;
    const int row = first_row + get<0>(coord(r, 0)), column = first_column + get<1>(coord(0, 0)) + c / kColumns * kStep;
    const bool odd = row & 1;
    const int made = odd ? column + kStep : column;  // the column whose words this thread makes
    constexpr bool kKeys = kSide == Rows::kKeys;
    const Philox words = kKeys ? dropout.words(batch, head, made, row) : dropout.words(batch, head, row, made);
    array<Columns, 2> found;
    const auto share = [&](auto column_0, std::uint32_t Columns::* flags) {
      constexpr int kOfEven = kKeys ? Dropout::word_of(column_0, 0) : Dropout::word_of(0, column_0);
      constexpr int kOfOdd = kKeys ? Dropout::word_of(column_0, 1) : Dropout::word_of(1, column_0);
      const std::uint32_t of_even = kept(words.word[kOfEven]), of_odd = kept(words.word[kOfOdd]);
      const std::uint32_t given = __shfl_xor_sync(~0u, odd ? of_even : of_odd, 4);
      found[0].*flags = odd ? given : of_even;
      found[1].*flags = odd ? of_odd : given;
    };
    share(_0{}, &Columns::of_even);
    share(_1{}, &Columns::of_odd);
    if constexpr (kColumns == 2) {  // all of this thread's columns have the same bit 3
      const int shift = 8 * (kKeys ? Dropout::byte_of(column, 0) : Dropout::byte_of(0, column));
      for (Columns& columns : found) columns = {columns.of_even >> shift, columns.of_odd >> shift};
    }
    return found;
  }

  /// Calls `visit(r, c, kept)` for all of a thread's rows and columns, with the Kept whose first are r and c.
  template <class Coord, class Visit>
  CUTE_DEVICE void for_each(Coord const& coord, Visit&& visit) const {
    using namespace cute;
    static_assert(size<0>(Coord{}) % 2 == 0 && size<1>(Coord{}) % (2 * kColumns) == 0);
    CUTE_UNROLL
    for (int r = 0; r < size<0>(coord); r += 2) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(coord); c += 2 * kColumns) {
        const auto found = at(coord, r, c);
        visit(r, c, found[0]);
        visit(r, c + kColumns, found[1]);
      }
    }
  }
};

}  // namespace flashtile
