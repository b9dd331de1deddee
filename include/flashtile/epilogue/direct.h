// This epilogue stores finished rows from registers straight to memory: it takes no shared memory and no barrier.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/epilogue/rows.h"
#include "flashtile/math/round.h"
#include "flashtile/params.h"

namespace flashtile {

/// Transposes the 4 × 4 words of a quad's threads: thread t gets the t-th word of threads 0, 1, 2, 3. It takes two
/// steps, which exchange halves, then neighbours.
CUTE_DEVICE void transpose_quad(std::uint32_t (&word)[4], int lane) {
  const auto exchange = [&](std::uint32_t& a, std::uint32_t& b, int distance) {
    const bool upper = lane & distance;
    const std::uint32_t got = __shfl_xor_sync(0xffffffff, upper ? a : b, distance);
    (upper ? a : b) = got;
  };
  exchange(word[0], word[2], 2);
  exchange(word[1], word[3], 2);
  exchange(word[0], word[1], 1);
  exchange(word[2], word[3], 1);
}

/// Stores under a predicate: written as an `if`, each store would be a branch.
CUTE_DEVICE void store_if(bool condition, void* to, std::uint32_t const (&word)[4]) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"(int(condition)),
      "l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
      : "memory");
}

/// Stores row r of accumulators of a wgmma TiledMma, seen as (row, column), at `to`, its first `columns` columns. In a
/// block of 8 columns a thread has two. After exchanging four blocks with its quad it has eight neighbouring ones, 16
/// bytes to store, `first` columns further on. All threads of a quad must store the same row of the tile.
template <class Element, class Rows>
CUTE_DEVICE void store_row(Rows const& rows, int r, Element* to, int columns, int first = 8 * (threadIdx.x % 4)) {
  using namespace cute;
  constexpr int kColumnsOfThread = size<1>(decltype(rows.layout()){});  // two of each block of 8
  static_assert(kColumnsOfThread % 8 == 0);
  CUTE_UNROLL
  for (int c = 0; c < kColumnsOfThread; c += 8) {
    std::uint32_t word[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) word[i] = round_pair<Element>(rows(r, c + 2 * i), rows(r, c + 2 * i + 1));
    transpose_quad(word, threadIdx.x % 4);
    store_if(4 * c + first < columns, to + 4 * c + first, word);
  }
}

/// Stores the finished rows of a tile. The column where a thread begins is computed once for all of them.
template <class Element, class Rows, class Coord>
CUTE_DEVICE void store_rows(ForwardParams const& params, TileCoord tile, Span queries, Rows const& rows,
                            Coord const& coord, int first_row) {
  using namespace cute;
  HeadPacking const& packing = params.scores.packing;
  const int quad_lane = threadIdx.x % 4;
  const int columns = params.head_dim_v - 8 * quad_lane;
  Element* out = static_cast<Element*>(params.out) + params.out_strides.at(tile.batch, queries.first) +
                 tile.head * params.out_strides.head + 8 * quad_lane;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(rows); ++r) {
    const QueriesOfRows of_rows(packing, first_row, get<0>(coord(r / 2 * 2, 0)));
    const int columns_of_row = of_rows.query(r) < min(queries.size, of_rows.end) ? columns : 0;
    Element* const out_row =
        out + of_rows.query(r) * params.out_strides.row + of_rows.head(r) * params.out_strides.head;
    store_row(rows, r, out_row, columns_of_row, 0);
  }
}

}  // namespace flashtile
