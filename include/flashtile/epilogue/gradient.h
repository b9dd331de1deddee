// This epilogue stores a finished tile of dQ, dK or dV of a wgmma from registers straight to memory.
#pragma once

#include "flashtile/epilogue/direct.h"

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

/// Scales and rounds the accumulators of a (kRows, head_dim) tile of `Mma`, whose warpgroups divide the rows, and
/// stores the rows from `first_row` on that exist. With kRagged it stores rows that do not count (see Span) as 0.
/// `thread` counts from the first of the Mma.
template <int kRows, class Mma, bool kRagged, class Element, class Accumulator>
CUTE_DEVICE void store_gradient(Accumulator& acc, float scale, GradientHead<Element> const& head, int first_row,
                                int thread) {
  using namespace cute;
  constexpr int kColumns = size<1>(typename Mma::AtomShape_MNK{});
  Tensor coord =
      rows_and_columns(Mma{}.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{})));
  Tensor tile = rows_and_columns(acc);  // (row, head_dim)
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) acc(i) *= scale;
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

}  // namespace flashtile
