// This epilogue leaves what a part of a block of keys contributes to dK or dV in the workspace.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"

namespace flashtile {

/// Stores under a predicate: written as an `if`, each store would be a branch.
CUTE_DEVICE void store_pair_if(bool condition, float* to, float a, float b) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3}; }" ::"r"(int(condition)),
               "l"(to), "f"(a), "f"(b)
               : "memory");
}

/// Stores the accumulators of a (kN, head_dim) tile of `Mma` as they are, at `place` of the workspace's `partial`
/// tiles. Rows behind the last key that counts are left out, as nobody reads them. `thread` counts from the first of
/// the Mma.
template <int kN, int kHeadDim, class Mma, class Accumulator>
CUTE_DEVICE void store_partial(Accumulator const& acc, float* partial, int place, int keys, int columns, int thread) {
  using namespace cute;
  Tensor coord =
      rows_and_columns(Mma{}.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kN>, Int<kHeadDim>>{})));
  Tensor tile = rows_and_columns(acc);  // (row, head_dim)
  float* const origin = partial + std::int64_t(place) * kN * columns;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(tile); ++r) {
    const int row = get<0>(coord(r, 0)), columns_of_row = row < keys ? columns : 0;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(tile); c += 2) {
      const int column = get<1>(coord(r, c));
      store_pair_if(column < columns_of_row, origin + row * columns + column, tile(r, c), tile(r, c + 1));
    }
  }
}

}  // namespace flashtile
