#include "flashtile/tensor_map.h"

#include <array>

#include "flashtile/driver.h"
#include "recent.h"

namespace flashtile {
namespace {

/// All that a description holds but the address.
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

/// Position 0 of shift 0: for ragged rows, T of them before the tensor.
void* begin_of(const Key& key, const TensorView& t) {
  const std::int64_t rows = key.ragged ? key.shape[1] * key.strides[1] : 0;
  return reinterpret_cast<void*>(reinterpret_cast<std::intptr_t>(t.data) - rows * bytes_of(key.dtype));
}

CUtensorMap encode(const Key& key, const TensorView& t) {
  const auto size = static_cast<std::uint64_t>(bytes_of(key.dtype));
  const auto extent = [&](std::size_t i) { return static_cast<std::uint64_t>(key.shape[i]); };
  const auto packed = static_cast<std::uint64_t>(key.packing.heads());
  const std::uint64_t last = key.ragged ? extent(1) + 1 : extent(0);
  const std::uint64_t shape[] = {extent(3), packed, extent(1), extent(2) / packed, last};
  // A dimension of one element may have any stride, also one that TMA does not take.
  const auto stride = [&](std::size_t dimension, std::size_t i, std::uint64_t step = 1) {
    return shape[dimension] == 1 ? 16 : static_cast<std::uint64_t>(key.strides[i]) * size * step;
  };
  const std::uint64_t strides[] = {stride(1, 2), stride(2, 1), stride(3, 2, packed),
                                   stride(4, key.ragged ? 1 : 0)};  // bytes
  const std::uint32_t box[] = {static_cast<std::uint32_t>(key.columns_per_box), static_cast<std::uint32_t>(packed),
                               static_cast<std::uint32_t>(key.packing.query(key.rows)), 1, 1};
  const std::uint32_t element_strides[] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  call_driver("cuTensorMapEncodeTiled", t.device.index, [&] {
    return encoder()(&map,
                     key.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     5, begin_of(key, t), shape, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     key.columns_per_box * size == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
  return map;
}

}  // namespace

// To encode a description takes the driver far longer than to give a known one another address.
CUtensorMap head_tiles(const TensorView& t, int rows, int columns_per_box, bool ragged, HeadPacking packing) {
  if (t.empty()) return {};
  static const auto replace_address =
      driver_function<decltype(&cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
  static thread_local Recent<Key, CUtensorMap> recent;
  const Key key{t.dtype, rows, columns_per_box, ragged, packing, t.shape, t.strides};
  CUtensorMap map = recent.get(key, [&] { return encode(key, t); });
  call_driver("cuTensorMapReplaceAddress", t.device.index, [&] { return replace_address(&map, begin_of(key, t)); });
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
