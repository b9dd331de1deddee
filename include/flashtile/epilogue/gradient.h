// This epilogue stores a finished tile of dQ, dK or dV of a wgmma, from registers straight to memory, or by TMA where
// shared memory has room for the tile.
#pragma once

#include "flashtile/epilogue/direct.h"
#include "flashtile/epilogue/staged.h"

namespace flashtile {

/// GradientHead says where one head of a gradient lies, of which a tile is stored.
template <class Element>
struct GradientHead {
  Element* data;
  std::int64_t row_stride;
  Span span;
  int columns;

  CUTE_DEVICE static GradientHead of(void* gradient, Strides const& strides, int batch, int head, Span span,
                                     int columns) {
    return {static_cast<Element*>(gradient) + strides.at(batch, span.first) + head * strides.head, strides.row, span,
            columns};
  }
};

/// Each warp of a wgmma has so many rows of accumulators.
inline constexpr int kRowsOfWarp = 16;

/// Multiplies all accumulators by `scale`.
template <class Accumulator>
CUTE_DEVICE void scale_gradient(Accumulator& acc, float scale) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); ++i) acc(i) *= scale;
}

/// Rounds the accumulators of a (kRows, head_dim) tile of `Mma`, whose warpgroups divide the rows, and stores the rows
/// from `first_row` on that exist. With kRagged it stores rows that do not count (see Span) as 0. `thread` counts from
/// the first of the Mma.
template <int kRows, class Mma, bool kRagged, class Element, class Accumulator>
CUTE_DEVICE void store_gradient(Accumulator& acc, GradientHead<Element> const& head, int first_row, int thread) {
  using namespace cute;
  constexpr int kColumns = size<1>(typename Mma::AtomShape_MNK{});
  Tensor coord =
      rows_and_columns(Mma{}.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{})));
  Tensor tile = rows_and_columns(acc);  // (row, head_dim)
  if (kRagged && first_row + kRows > head.span.used) {
    CUTE_UNROLL
    for (int r = 0; r < size<0>(tile); ++r) {
      if (first_row + get<0>(coord(r, 0)) < head.span.used) continue;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(tile); ++c) tile(r, c) = 0;
    }
  }
  CUTE_UNROLL
  for (int r = 0; r < size<0>(tile); ++r) {
    const int row = first_row + get<0>(coord(r, 0));
    store_row(tile, r, head.data + row * head.row_stride, row < head.span.size ? head.columns : 0);
  }
}

/// Does the same for a dense batch by way of `staging`, a tile of shared memory that no thread reads any more: each
/// warp puts its rows there and has TMA store those that exist, by a map whose boxes have kRowsOfWarp rows and
/// kColumnsPerBox columns. The tile has the layout `Layout` (row, head_dim). This takes fewer instructions, which
/// counts where a thread block comes here once and has to wait for each line of code. Shared memory must outlive TMA's
/// reads of it.
template <class Layout, int kColumnsPerBox, class Element, class Accumulator>
CUTE_DEVICE void stage_and_store_gradient(CUtensorMap const& map, Accumulator const& acc, Element* staging,
                                          int first_row, int head, int batch, int thread) {
  using namespace cute;
  constexpr int kRows = size<0>(Layout{}), kColumns = size<1>(Layout{});
  const int row_of_tile = thread / 32 * kRowsOfWarp, lane = thread % 32;
  Element* const own = staging + row_of_tile * kColumnsPerBox;  // this warp's rows of the first box
  stage_rows<Layout, kColumnsPerBox>(rows_and_columns(acc), own, lane);
  tma_store_fence();
  __syncwarp();  // all lanes have staged their rows
  if (lane != 0) return;
  const TmaRows rows = TmaRows::dense(batch);
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kColumnsPerBox)
    SM90_TMA_STORE_5D::copy(&map, own + column * kRows, column, head, rows.position(first_row + row_of_tile),
                            rows.batch, rows.way_back);
  tma_store_arrive();
}

/// A warp does what stage_rows() does with 16 columns of the tile, which the rows of its accumulators are: stmatrix
/// transposes blocks of 8 × 8 on the way. They are in the first box, from `first_column` on.
template <class Layout, class Element, class Rows>
CUTE_DEVICE void stage_columns(Rows const& rows, Element* staging, int first_column, int lane) {
  using namespace cute;
  using Places = decltype(as_position_independent_swizzle_layout(Layout{}));
  constexpr int kStep = Places{}(_16{}, _0{}) * sizeof(Element);  // 16 rows on, with the same swizzle
  const int row = lane / 16 * 8 + lane % 8, column = first_column + lane / 8 % 2 * 8;
  const std::uint32_t first = cast_smem_ptr_to_uint(staging + Places{}(row, column));
  CUTE_UNROLL
  for (int c = 0; c < size<1>(decltype(rows.layout()){}); c += 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(first + c / 4 * kStep),
                 "r"(round_pair<Element>(rows(0, c), rows(0, c + 1))),
                 "r"(round_pair<Element>(rows(1, c), rows(1, c + 1))),
                 "r"(round_pair<Element>(rows(0, c + 2), rows(0, c + 3))),
                 "r"(round_pair<Element>(rows(1, c + 2), rows(1, c + 3)))
                 : "memory");
}

}  // namespace flashtile
