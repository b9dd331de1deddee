// This file says which of a thread's weights dropout removes, on tiles of scores in registers.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/dropout.h"
#include "flashtile/math/round.h"

namespace flashtile {

/// Rows says which side of a tile of scores its rows are.
enum class Rows { kQueries, kKeys };

/// Kept has a bit for each score (row, column) of one thread, which is set where its weight stays. Four scores share
/// their random words: two rows by two columns that lie 8 apart.
template <int kRows, int kColumns>
struct Kept {
  using Bits = std::conditional_t<(kColumns > 32), std::uint64_t, std::uint32_t>;
  Bits bits[kRows];

  /// Makes the bits for the tile from `first_row`, a multiple of 16, and `first_column` on; `coord` has the coordinates
  /// in it. A thread has two columns of every kColumnStep.
  template <Rows kSide, int kColumnStep = 8, class Coord>
  CUTE_DEVICE static Kept of(Dropout const& dropout, int batch, int head, Coord const& coord, int first_row,
                             int first_column) {
    using namespace cute;
    // Otherwise the column 8 further on has other words, or is another thread's.
    const bool two_columns = kColumnStep == 8 && first_column % 16 == 0;
    Kept kept;
    const int column_of_thread = first_column + get<1>(coord(0, 0));
    CUTE_UNROLL
    for (int r = 0; r < kRows; r += 2) {
      const int row = first_row + get<0>(coord(r, 0));
      Bits upper = 0, lower = 0;  // bits of rows r and r + 1
      CUTE_NO_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        if (two_columns && (c & 2)) continue;
        const int column = column_of_thread + c / 2 * kColumnStep + c % 2;
        const bool column_8 = (column & 8) != 0;
        constexpr bool kKeys = kSide == Rows::kKeys;
        const Philox words = kKeys ? dropout.words(batch, head, column, row) : dropout.words(batch, head, row, column);
        const auto bit = [&](bool row_8, bool column_8) -> Bits {
          return kKeys ? dropout.keeps(words, column_8, row_8) : dropout.keeps(words, row_8, column_8);
        };
        upper |= bit(false, column_8) << c;
        lower |= bit(true, column_8) << c;
        if (two_columns) {
          upper |= bit(false, true) << (c + 2);
          lower |= bit(true, true) << (c + 2);
        }
      }
      kept.bits[r] = upper;
      kept.bits[r + 1] = lower;
    }
    return kept;
  }

  CUTE_DEVICE bool operator()(int r, int c) const { return bits[r] >> c & 1; }

  /// Sets dropped values (row, column) of the columns from `first` on to 0, and multiplies the others with `scale`.
  template <class Values>
  CUTE_DEVICE void keep(Values&& values, float scale = 1, int first = 0) const {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(values); ++c) values(r, c) = (*this)(r, first + c) ? scale * values(r, c) : 0.0f;
    }
  }

  /// Makes dropped weights negative: weights never are, so the sign tells who takes them next which were dropped.
  template <class Values>
  CUTE_DEVICE void mark(Values&& weights) const {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) weights(r, c) = (*this)(r, c) ? weights(r, c) : -weights(r, c);
    }
  }

  /// Sets dropped weights to 0 in `words`, each of which is two weights of 16 bits, as a wgmma has them: two columns of
  /// row 0, of row 1, …
  template <class Words>
  CUTE_DEVICE void keep_words(Words&& words) const {
    for_words(words, [](std::uint32_t& word, std::uint32_t kept) { word &= kept; });
  }
  template <class Words>
  CUTE_DEVICE void mark_words(Words&& words) const {
    for_words(words, [](std::uint32_t& word, std::uint32_t kept) { word |= ~kept & 0x80008000; });
  }

 private:
  template <class Words, class Visit>
  CUTE_DEVICE void for_words(Words& words, Visit&& visit) const {
    using namespace cute;
    static_assert(kRows == 2);
    CUTE_UNROLL
    for (int i = 0; i < size(words); ++i) {
      const int r = i % 2, c = i / 2 * 2;
      visit(words(i), ((*this)(r, c) ? 0xffffu : 0) | ((*this)(r, c + 1) ? 0xffff0000u : 0));
    }
  }
};

/// KeptOf is Kept for the scores of `Coord`, a tensor of coordinates (row, column).
template <class Coord>
using KeptOf = Kept<decltype(cute::size<0>(Coord{}))::value, decltype(cute::size<1>(Coord{}))::value>;

}  // namespace flashtile
