#include "flashtile/load/tensor_map.h"

#include <array>

#include "flashtile/cuda/driver.h"
#include "recent.h"

namespace flashtile {
namespace {

/// A tensor map depends on all this, and on the address.
struct Key {
  DType dtype = DType::kOther;
  int rows = 0, columns_per_box = 0;
  bool ragged = false;
  HeadPacking packing;
  std::array<std::int64_t, kMaxRank> shape{}, strides{};
  bool operator==(const Key&) const = default;
};

decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto encode_tiled = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return encode_tiled;
}

/// Returns the swizzle of boxes whose rows have so many bytes.
CUtensorMapSwizzle swizzle_of(std::uint64_t bytes) {
  return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : CU_TENSOR_MAP_SWIZZLE_32B;
}

CUtensorMap encode(const Key& key, const TensorView& t) {
  const auto size = static_cast<std::uint64_t>(bytes_of(key.dtype));
  const auto extent = [&](std::size_t i) { return static_cast<std::uint64_t>(key.shape[i]); };
  // Returns a stride in bytes. A dimension of one element may have any stride, even one that TMA does not take.
  const auto stride = [&](std::size_t i) {
    return extent(i) == 1 ? 16 : static_cast<std::uint64_t>(key.strides[i]) * size;
  };
  using Shape = std::array<std::uint64_t, 5>;
  using Strides = std::array<std::uint64_t, 4>;  // of all dimensions but columns
  constexpr std::uint64_t kRowsOfStep = kEndOfRows / kWayBack, kStep = (~std::uint64_t{0} / kWayBack) + 1;
  const Shape shape = key.ragged ? Shape{extent(3), extent(2), kEndOfRows, extent(1) + 1, kWayBack + 1}
                                 : Shape{extent(3), extent(2), extent(1), extent(0), 1};
  const Strides strides = key.ragged ? Strides{stride(2), stride(1), stride(1), kStep - kRowsOfStep * stride(1)}
                                     : Strides{stride(2), stride(1), stride(0), 16};
  // HeadPacking counts in 16 rows; boxes of pages may have fewer.
  const int queries = key.packing.heads == 1 ? key.rows : key.packing.queries_of(key.rows);
  const std::uint32_t box[] = {static_cast<std::uint32_t>(key.columns_per_box),
                               static_cast<std::uint32_t>(key.packing.heads), static_cast<std::uint32_t>(queries), 1,
                               1};
  const std::uint32_t element_strides[] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = is_fp8(key.dtype)              ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : key.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                  : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  call_driver("cuTensorMapEncodeTiled", t.device.index, [&] {
    return encoder()(&map, type, 5, t.data, shape.data(), strides.data(), box, element_strides,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(key.columns_per_box * size),
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
  return map;
}

}  // namespace

// The driver takes far longer to encode a tensor map than to give a known one another address.
CUtensorMap head_tiles(const TensorView& t, int rows, int columns_per_box, bool ragged, HeadPacking packing) {
  if (!t.given() || t.empty()) return {};
  static const auto replace_address =
      driver_function<decltype(&cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
  static thread_local Recent<Key, CUtensorMap> recent;
  const Key key{t.dtype, rows, columns_per_box, ragged, packing, t.shape, t.strides};
  CUtensorMap map = recent.get(key, [&] { return encode(key, t); });
  call_driver("cuTensorMapReplaceAddress", t.device.index, [&] { return replace_address(&map, t.data); });
  return map;
}

CUtensorMap float_boxes(float* matrix, std::int64_t rows, std::int64_t columns, int rows_per_box, int columns_per_box,
                        Device device) {
  if (rows == 0 || columns == 0) return {};
  const std::uint64_t shape[] = {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)};
  const std::uint64_t strides[] = {shape[0] * sizeof(float)};
  const std::uint32_t box[] = {static_cast<std::uint32_t>(columns_per_box), static_cast<std::uint32_t>(rows_per_box)};
  const std::uint32_t element_strides[] = {1, 1};
  CUtensorMap map;
  call_driver("cuTensorMapEncodeTiled", device.index, [&] {
    return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, matrix, shape, strides, box, element_strides,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
  return map;
}

}  // namespace flashtile
