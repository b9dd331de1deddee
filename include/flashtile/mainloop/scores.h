// This file applies the score map and the mask to a tile of raw scores in registers, before softmax.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Calls `visit(c, values)` for every second column c of a thread. `values` are what `of_columns`, one float per column
/// of the tile, has for columns c and c + 1.
template <class Coord, class Visit>
CUTE_DEVICE void for_column_pairs(Coord const& coord, const float* of_columns, Visit&& visit) {
  using namespace cute;
  CUTE_UNROLL
  for (int c = 0; c < size<1>(coord); c += 2)
    visit(c, *reinterpret_cast<const float2*>(of_columns + get<1>(coord(0, c))));
}

/// Returns how many of a thread's columns, 0, 1, 8, 9, 16, 17, … with two of every 8, are below `column`; or of 0, 8,
/// 16, … with one.
template <int kColumnStep, int kOfStep = 2>
CUTE_DEVICE int columns_before(int column) {
  static_assert((kColumnStep & (kColumnStep - 1)) == 0);  // so that negative columns round down
  constexpr int kLog2 = kColumnStep == 8 ? 3 : kColumnStep == 16 ? 4 : 5;
  static_assert(1 << kLog2 == kColumnStep);
  if constexpr (kOfStep == 1) return (column + kColumnStep - 1) >> kLog2;
  return 2 * (column >> kLog2) + min(column & (kColumnStep - 1), 2);
}

/// Returns a word whose bits [0, n) are set.
CUTE_DEVICE std::uint32_t bits_below(int n) {
  return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1;
}

/// Calls `visit(c)` for every kTogether-th column of `scores` (row, column), to change columns c to c + kTogether − 1.
/// All columns rotate so that these are always the first ones, since registers have no index at run time. It is for
/// what few inputs need: unrolled, such code fills the instruction cache in the midst of what all inputs need.
template <int kTogether, class Scores, class Visit>
CUTE_DEVICE void for_columns_in_turn(Scores& scores, Visit&& visit) {
  using namespace cute;
  constexpr int kColumns = size<1>(decltype(scores.layout()){});
  static_assert(kColumns % kTogether == 0);
  CUTE_NO_UNROLL
  for (int c = 0; c < kColumns; c += kTogether) {
    visit(c);
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      float first[kTogether];
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) first[i] = scores(r, i);
      CUTE_UNROLL
      for (int i = 0; i + kTogether < kColumns; ++i) scores(r, i) = scores(r, i + kTogether);
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) scores(r, kColumns - kTogether + i) = first[i];
    }
  }
}

/// Softcaps says which softcaps a kernel serves: all, or those up to kUsualSoftcap.
enum class Softcaps { kAny, kUsual };

/// CappedExponents turns raw scores near 0 into exponents for OnlineSoftmax::weigh_by(): softcap's tanh, of which
/// ScoreMap has a polynomial there of kTerms terms, and the exponent's FMA in one. far() tells afterwards whether a
/// score was not near.
template <int kTerms>
struct CappedExponents {
  ScoreMap const& map;
  float const (&offset)[2];
  int largest_square[2] = {};  // of even and odd calls; floats from 0 up are in the order of their bits

  CUTE_DEVICE void operator()(int i, float& a, float& b) {
    const float a_square = a * a, b_square = b * b;
    int& largest = largest_square[i % 2];
    largest = __vimax3_s32(largest, __float_as_int(a_square), __float_as_int(b_square));  // one instruction
    a = fmaf(a, of_square(a_square), -offset[i % 2]);
    b = fmaf(b, of_square(b_square), -offset[i % 2]);
  }
  CUTE_DEVICE float of_square(float square) const {
    float sum = map.near_terms_log2[kTerms - 1];
    CUTE_UNROLL
    for (int n = kTerms - 2; n >= 0; --n) sum = fmaf(sum, square, map.near_terms_log2[n]);
    return sum;
  }
  CUTE_DEVICE bool far() const {
    return max(largest_square[0], largest_square[1]) > __float_as_int(map.near * map.near);
  }
};

/// StretchedExponents does the same for scores that are stretched and not capped, where all keys are on one side of the
/// diagonal, so that ALiBi is linear in them. `slope_log2` has the side's sign, and `first` is what the first column of
/// each of a thread's rows adds to the exponent; it has two columns of every 8.
struct StretchedExponents {
  ScoreMap const& map;
  float slope_log2;
  float first[2];

  CUTE_DEVICE void operator()(int i, float& a, float& b) const {
    a = fmaf(a, map.outer_log2, fmaf(float(i / 2 * 8), -slope_log2, first[i % 2]));
    b = fmaf(b, map.outer_log2, fmaf(float(i / 2 * 8 + 1), -slope_log2, first[i % 2]));
  }
};

/// ScoreTile has the scores of the rows from `first_row` on. Tensors of scores are (row, column) of one thread, and
/// `coord` has the coordinates of each in the tile, whose columns begin at `first_column` of `lengths`.
template <class Packing>
struct ScoreTile {
  ScoreParams<Packing> const& params;
  TileCoord tile;
  int first_row;
  Lengths lengths;
  const float* slope = nullptr;  // the tile's ALiBi slope, where it has been looked up

  /// Returns tanh x as 1 − 2 / (1 + e^2x), with an absolute error. Small arguments, which softcaps far above the scores
  /// give, lose their precision by that: for these kAny takes a polynomial. Relative errors are 3e-8 then, and 2e-6 for
  /// the smallest other arguments.
  template <Softcaps kSoftcaps>
  CUTE_DEVICE static float tanh_of(float x) {
    const float large = 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2 * kLog2e * x));
    if constexpr (kSoftcaps == Softcaps::kUsual) return large;
    const float z = x * x;
    const float small = fmaf(x * z, fmaf(z, 2.0f / 15, -1.0f / 3), x);
    return z < 0x1p-7f ? small : large;
  }

  /// Turns raw scores into scores: see ScoreMap.
  template <Softcaps kSoftcaps, class Scores, class Coord>
  CUTE_DEVICE void map(Scores& scores, Coord const& coord, int first_column) const {
    if (params.map.capped) cap<kSoftcaps>(scores);
    if (params.map.stretched) stretch(scores, coord, first_column);
  }

  /// Does the same for usual softcaps, where scores are not both capped and stretched: with fewer ways through the code
  /// it takes fewer registers.
  template <bool kAsksWhetherNear = true, class Scores, class Coord>
  CUTE_DEVICE void cap_or_stretch(Scores& scores, Coord const& coord, int first_column) const {
    if (params.map.capped)
      cap<Softcaps::kUsual, kAsksWhetherNear>(scores);
    else
      stretch(scores, coord, first_column);
  }

  /// Does the first half of map(): the tanh of softcap. Most tiles have no score near the softcap: theirs need no
  /// exponential, of which there would be as many as softmax takes, and no reciprocal. Asking for that, and the loop
  /// that the other tiles take, can cost a kernel with few registers left more: the backward at D256 spilled by it, and
  /// took 1.05 to 1.3 times as long, with a softcap and without.
  template <Softcaps kSoftcaps, bool kAsksWhetherNear = kSoftcaps == Softcaps::kUsual, class Scores>
  CUTE_DEVICE void cap(Scores& scores) const {
    using namespace cute;
    if constexpr (kAsksWhetherNear) {
      if (cap_near(scores)) return;
      constexpr int kQuarter = size<1>(decltype(scores.layout()){}) / 4;
      for_columns_in_turn<kQuarter>(scores, [&](int) {
        CUTE_UNROLL
        for (int r = 0; r < size<0>(scores); ++r) {
          CUTE_UNROLL
          for (int c = 0; c < kQuarter; ++c) scores(r, c) = tanh_of<kSoftcaps>(params.map.inner * scores(r, c));
        }
      });
    } else {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of<kSoftcaps>(params.map.inner * scores(i));
    }
  }

  /// Does that for raw scores up to `near` (see ScoreMap). Returns false, with nothing done, if the warp has others.
  template <class Scores>
  CUTE_DEVICE bool cap_near(Scores& scores) const {
    using namespace cute;
    constexpr int kTogether = 8;
    static_assert(size(decltype(scores.layout()){}) % kTogether == 0);
    float largest[kTogether] = {};
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) largest[i % kTogether] = fmaxf(largest[i % kTogether], fabsf(scores(i)));
    CUTE_UNROLL
    for (int i = 1; i < kTogether; ++i) largest[0] = fmaxf(largest[0], largest[i]);
    if (__any_sync(0xffffffff, largest[0] > params.map.near)) return false;
    CUTE_UNROLL
    for (int first = 0; first < size(scores); first += kTogether) {
      float some[kTogether];
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) some[i] = scores(first + i);
      params.map.tanh_near(some);
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) scores(first + i) = some[i];
    }
    return true;
  }

  /// Does the second half: the scale, and ALiBi. No row is unpacked, as select packs no heads where there are slopes.
  template <class Scores, class Coord>
  CUTE_DEVICE void stretch(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    const float outer = params.map.outer, slope_of_head = slope ? *slope : params.slopes.at(tile.batch, tile.head);
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const int column = get<1>(coord(r, 0));
      const float first = distance_of_first(coord, r, first_column);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        const float distance = fabsf(first + float(get<1>(coord(r, c)) - column));
        scores(r, c) = outer * scores(r, c) - slope_of_head * distance;
      }
    }
  }

  /// Returns how far the first column of row r is behind the one from which ALiBi counts. It is converted once for a
  /// row, since a conversion takes as long as an exponential.
  template <class Coord>
  CUTE_DEVICE float distance_of_first(Coord const& coord, int r, int first_column) const {
    using namespace cute;
    return float(first_column + get<1>(coord(r, 0)) - params.mask.origin(first_row + get<0>(coord(r, 0)), lengths));
  }

  /// Returns the derivative of the cap at a score that cap() made, or 0 if mask() hid it after that.
  CUTE_DEVICE static float cap_slope(float score) { return score == -kInfinity ? 0.0f : 1.0f - score * score; }

  /// Hides what the mask does not show of an edge tile. A thread has kOfStep columns of every kColumnStep.
  template <int kColumnStep = 8, int kOfStep = 2, class Scores, class Coord>
  CUTE_DEVICE void mask(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    constexpr int kColumns = size<1>(decltype(scores.layout()){});
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const Range visible = params.mask.columns(params.packing.query(first_row, get<0>(coord(r, 0))), lengths);
      const int first = first_column + get<1>(coord(r, 0));
      const int begin = columns_before<kColumnStep, kOfStep>(visible.begin - first);
      const int end = columns_before<kColumnStep, kOfStep>(visible.end - first);
      std::uint32_t shown = 0;  // a bit for each of 32 columns: testing one takes less than comparing with both ends
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        if (c % 32 == 0) shown = bits_below(end - c) & ~bits_below(begin - c);
        if (!(shown & (1u << c % 32))) scores(r, c) = -kInfinity;
      }
    }
  }
};

/// HiddenBits are what a column mask hides of the 16 rows of a warp in a block of kColumns columns. A lane asks two
/// neighbouring columns of every 64, for all rows: asked for each element, a tile would take more than twice the
/// instructions. Then lanes exchange bits, and each has those of its own scores, 32 of every 64 columns: bit
/// 16 · i + 8 · r + c is that of row r of its two, and of column i of its two among the c-th eight. All this can be
/// done before there are scores.
template <int kColumns>
struct HiddenBits {
  static constexpr int kRows = 16, kAtOnce = 64, kChunks = (kColumns + kAtOnce - 1) / kAtOnce;
  std::uint32_t bits[kChunks] = {};

  /// Asks the block whose first column `columns` have, up to the last of `count` that there are, for the warp's rows
  /// from `row` on. What is found of columns behind the last one means nothing.
  CUTE_DEVICE void find(const HiddenRows* columns, int count, int row) {
    // Of no columns there is nothing to ask. Where a block always has some, as those in shared memory, the caller says
    // so by a constant, and the compiler leaves the branch out.
    if (count <= 0) return;
    const auto from = [&](int first) {  // bits of the rows from `first` on; a shift by 32 or more leaves none
      std::uint32_t rows;
      asm("shl.b32 %0, %1, %2;" : "=r"(rows) : "r"(~0u), "r"(max(first, row) - row));
      return rows;
    };
    const auto bits_of = [&](Range rows) { return from(rows.begin) & ~from(rows.end); };
    find_by([&](int column) {
      const HiddenRows hidden = columns[min(column, count - 1)];
      return bits_of(hidden.first) | bits_of(hidden.second);
    });
  }

  /// Does so by `hidden(column)`, which returns a column's hidden rows: bit r of the lower 16 is that of row r.
  template <class Hidden>
  CUTE_DEVICE void find_by(Hidden&& hidden) {
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = kAtOnce * chunk + 2 * int(threadIdx.x % 32);
      bits[chunk] = (hidden(column) & 0xffff) | hidden(column + 1) << kRows;
    }
    exchange();
  }

  /// Hides them from a thread's scores, two columns of every eight in each of two rows.
  template <class Scores>
  CUTE_DEVICE void hide(Scores& scores) const {
    using namespace cute;
    static_assert(size<0>(decltype(scores.layout()){}) == 2 && 4 * size<1>(decltype(scores.layout()){}) == kColumns);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int column = 0; column < kColumns; column += 8) {
          const int c = column % kAtOnce / 8;
          if (bits[column / kAtOnce] & (1u << (16 * i + 8 * r + c))) scores(r, column / 4 + i) = -kInfinity;
        }
      }
    }
  }

 private:
  /// Transposes the bits of every eight lanes 4 · c + q, which have columns 8 · c + 2 · q and their neighbours, rows in
  /// bits 0 to 7 of each byte: lane 4 · g + q gets those of rows g, column c in bit c. In each of three steps two lanes
  /// exchange half of their bits.
  CUTE_DEVICE void exchange() {
    const int lane = int(threadIdx.x % 32);
    CUTE_UNROLL
    for (int by = 4; by > 0; by /= 2) {
      const std::uint32_t low = by == 4 ? 0x0f0f0f0f : by == 2 ? 0x33333333 : 0x55555555;
      const bool upper = (lane & (4 * by)) != 0;
      const std::uint32_t kept = upper ? ~low : low;
      const int turn = upper ? 32 - by : by;
      CUTE_UNROLL
      for (std::uint32_t& own : bits) {
        const std::uint32_t other = __shfl_xor_sync(0xffffffff, own, 4 * by);
        own = (own & kept) | (__funnelshift_l(other, other, turn) & ~kept);
      }
    }
  }
};

/// HiddenQueries are what a column mask hides of a tile whose rows are keys, of which a thread has kKeys, and whose
/// columns are queries: a bit for each of the thread's columns, two of every kColumnStep. This, too, can be done before
/// there are scores.
template <int kKeys, int kColumnStep = 8>
struct HiddenQueries {
  std::uint32_t bits[kKeys] = {};

  /// Asks the keys of the tile, of which `hidden` has the first, up to the last of `count` that there are, for queries
  /// from `first_query` on.
  template <class Coord>
  CUTE_DEVICE void find(Coord const& coord, const HiddenRows* hidden, int count, int first_query) {
    using namespace cute;
    if (count <= 0) return;  // never so, but a branch: without it the compiler moves all this behind the wait for S
    const int first = first_query + get<1>(coord(0, 0));
    const auto below = [&](int query) { return bits_below(columns_before<kColumnStep>(max(query, 0) - first)); };
    const auto bits_of = [&](Range queries) { return below(queries.end) & ~below(queries.begin); };
    CUTE_UNROLL
    for (int r = 0; r < kKeys; ++r) {
      const HiddenRows of_key = hidden[min(int(get<0>(coord(r, 0))), count - 1)];
      bits[r] = bits_of(of_key.first) | bits_of(of_key.second);
    }
  }

  template <class Scores>
  CUTE_DEVICE void hide(Scores& scores) const {
    using namespace cute;
    constexpr int kColumns = size<1>(decltype(scores.layout()){});
    static_assert(size<0>(decltype(scores.layout()){}) == kKeys && kColumns <= 32);
    CUTE_UNROLL
    for (int r = 0; r < kKeys; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c)
        if (bits[r] & (1u << c)) scores(r, c) = -kInfinity;
    }
  }
};

/// Hides what a column mask hides of a tile whose rows are queries, column by column: Ampere's kernels do, where a
/// thread's rows are too many for HiddenBits. `hidden` has `columns` columns; hides(row, HiddenRows) answers for a row.
template <class Scores, class Coord, class Hides>
CUTE_DEVICE void hide_by_columns(Scores& scores, Coord const& coord, const HiddenRows* hidden, int columns,
                                 int first_column, Hides&& hides) {
  using namespace cute;
  CUTE_UNROLL
  for (int c = 0; c < size<1>(scores); ++c) {
    const HiddenRows of_column = hidden[min(first_column + int(get<1>(coord(0, c))), columns - 1)];
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r)
      if (hides(int(get<0>(coord(r, 0))), of_column)) scores(r, c) = -kInfinity;
  }
}

/// A Hopper kernel without column masks has this instead of HiddenBits and HiddenQueries.
struct NothingHidden {};

/// Subtracts from the scores of a steep row of queries what a backward's weights are relative to: see
/// BackwardWorkspace. From such differences the row's lse_log2 in the workspace, −0, takes nothing more. However a
/// product Q·K is rounded this time, no weight of the row is above 1.
template <class Scores>
CUTE_DEVICE void relate_steep_row(Scores&& scores, BackwardWorkspace::SteepRow row) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(scores); ++i) scores(i) = min_or_nan((scores(i) - row.reference) - row.rest, 0.0f);
}

/// Does the same for those among the queries of a tile (key, query), the workspace's rows from `first_row` on, whose
/// lse_log2 is given. The scores of other queries stay as they are. A thread has two columns of every kColumnStep.
template <int kColumnStep = 8, class Scores, class Coord>
CUTE_DEVICE void relate_steep_rows(BackwardParams const& params, Scores& scores, Coord const& coord,
                                   const float* lse_log2, std::int64_t first_row) {
  using namespace cute;
  for_columns_in_turn<2>(scores, [&](int c) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = get<1>(coord(0, 0)) + c / 2 * kColumnStep + i;
      if (BackwardWorkspace::says_steep(lse_log2[row]))
        relate_steep_row(scores(_, i), params.workspace.steep_rows(params.memory)[first_row + row]);
    }
  });
}

}  // namespace flashtile
