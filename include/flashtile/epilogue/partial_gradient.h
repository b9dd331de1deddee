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
  const auto shape = Shape<Int<kN>, Int<kHeadDim>>{};
  const auto first = Mma{}.get_slice(thread).partition_C(make_identity_tensor(shape))(0);
  // All threads have their elements at the same distances from their first, which are constants of thread 0.
  Tensor places = rows_and_columns(Mma{}.get_slice(0).partition_C(make_identity_tensor(shape)));  // (row, head_dim)
  Tensor tile = rows_and_columns(acc);                                                            // (row, head_dim)
  float* const origin = partial + std::int64_t(place) * kN * columns + get<0>(first) * columns + get<1>(first);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(tile); ++r) {
    const int row = get<0>(places(r, 0));
    const int columns_of_row = get<0>(first) + row < keys ? columns - get<1>(first) : 0;
    float* const to = origin + row * columns;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(tile); c += 2) {
      const int column = get<1>(places(r, c));
      store_pair_if(column < columns_of_row, to + column, tile(r, c), tile(r, c + 1));
    }
  }
}

}  // namespace flashtile
