// Tiles by TMA, the copy engine of Hopper: one thread asks, and a barrier in shared memory is told when all has landed.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/driver.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// Describes the (rows, columns) tiles of the heads of a (B, S, H, D) tensor to TMA. A box is as wide as one swizzled
/// row of shared memory, 128 or 64 bytes; what lies outside the tensor arrives as zero. An empty tensor has none.
inline CUtensorMap head_tiles(const TensorView& t, int rows, int columns_per_box) {
  CUtensorMap map{};
  if (t.empty()) return map;
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const auto size = static_cast<std::uint64_t>(bytes_of(t.dtype));
  const auto extent = [&](int i) { return static_cast<std::uint64_t>(t.shape[i]); };
  // A dimension of one element may have any stride, also one that TMA does not take.
  const auto stride = [&](int i) { return t.shape[i] == 1 ? 16 : static_cast<std::uint64_t>(t.strides[i]) * size; };
  const std::uint64_t shape[] = {extent(3), extent(1), extent(2), extent(0)};  // D, S, H, B
  const std::uint64_t strides[] = {stride(1), stride(2), stride(0)};           // bytes; D is contiguous
  const std::uint32_t box[] = {static_cast<std::uint32_t>(columns_per_box), static_cast<std::uint32_t>(rows), 1, 1};
  const std::uint32_t element_strides[] = {1, 1, 1, 1};
  throw_on_error(
      encode(&map, t.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
             t.data, shape, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             columns_per_box * size == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "cuTensorMapEncodeTiled");
  return map;
}

/// Loads the tile of kRows rows from `row` on, all columns, into shared memory: one box after the other.
template <int kRows, int kColumns, int kColumnsPerBox, class Element>
CUTE_DEVICE void load_tile(CUtensorMap const& map, std::uint64_t* barrier, Element* shared, int row, int head,
                           int batch) {
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kColumnsPerBox) {
    cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                 shared + column * kRows, column, row, head, batch);
  }
}

}  // namespace flashtile
