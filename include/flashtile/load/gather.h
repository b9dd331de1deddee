// This file loads rows that need not be neighbours in memory, by cp.async (Ampere and later).
#pragma once

#include <cute/tensor.hpp>

namespace flashtile {

/// A CachePolicy says how the L2 cache keeps what is read once: as usual, or (`passes_by`) to be evicted first. In the
/// second case its lines make room for each other, so that dirty lines of others need not be written back meanwhile.
class CachePolicy {
 public:
  CUTE_DEVICE explicit CachePolicy(bool passes_by) {
    if (passes_by)
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(bits_));
    else  // by measurement it acts as no policy; evict_normal does not
      asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(bits_));
  }

  /// Copies 16 bytes, or writes as many zeros if nothing `exists` there.
  CUTE_DEVICE void copy(const void* from, void* to, bool exists) const {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                     cute::cast_smem_ptr_to_uint(to)),
                 "l"(from), "r"(exists ? 16 : 0), "l"(bits_));
  }

 private:
  std::uint64_t bits_;
};

/// Copies a (rows, head_dim) tile, whose row r lies at `row_at(r)`, to where Load, a CpAsyncTile, would. Elements
/// behind `rows` and `columns` become zero and are not read, wherever row_at() says that they lie.
template <class Load, class RowAt, class Shared>
CUTE_DEVICE void gather(CachePolicy const& policy, RowAt&& row_at, Shared const& sX, int rows, int columns,
                        int thread) {
  using namespace cute;
  auto copy_thread = typename Load::TiledCopy{}.get_slice(thread);
  Tensor tXsX = copy_thread.partition_D(sX);                                             // (vector, row, column)
  Tensor tXcX = copy_thread.partition_S(make_identity_tensor(product_each(shape(sX))));  // (vector, row, column)
  CUTE_UNROLL
  for (int r = 0; r < size<1>(tXsX); ++r) {
    const int row = get<0>(tXcX(0, r, 0));
    const auto* const from = row_at(row);
    CUTE_UNROLL
    for (int c = 0; c < size<2>(tXsX); ++c) {
      const int column = get<1>(tXcX(0, 0, c));
      policy.copy(from + column, raw_pointer_cast(&tXsX(0, r, c)), row < rows && column < columns);
    }
  }
}

}  // namespace flashtile
