// This file describes a tensor as the core sees it: memory, type, device, shape. It owns nothing and knows no
// framework.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace flashtile {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kE4M3, kE5M2, kInt32, kOther };
enum class DeviceType : std::uint8_t { kCpu, kCuda, kOther };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// This is a CUDA stream handle; a CPU ignores it.
using Stream = void*;

constexpr bool is_fp8(DType dtype) {
  return dtype == DType::kE4M3 || dtype == DType::kE5M2;
}

constexpr int bytes_of(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kInt32 ? 4 : is_fp8(dtype) ? 1 : 2;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kE4M3: return "float8_e4m3fn";
    case DType::kE5M2: return "float8_e5m2";
    case DType::kInt32: return "int32";
    case DType::kOther: break;
  }
  return "another dtype";
}

std::string name_of(Device device);

inline constexpr int kMaxRank = 4;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kOther;
  Device device;
  int rank = -1;  // -1: no tensor, as for an optional argument that is left out
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};  // in elements

  bool given() const { return rank >= 0; }
  bool empty() const {
    for (int i = 0; i < rank; ++i)
      if (shape[i] == 0) return true;
    return false;
  }
  /// Returns the rows of a ragged batch, (T, H, D), as a batch of one entry, (1, T, H, D), and any other tensor
  /// unchanged.
  TensorView with_batch() const {
    if (rank != 3) return *this;
    TensorView view = *this;
    view.rank = 4;
    view.shape = {1, shape[0], shape[1], shape[2]};
    view.strides = {0, strides[0], strides[1], strides[2]};
    return view;
  }
  /// Strides of dimensions with fewer than two elements are ignored.
  bool contiguous() const {
    std::int64_t stride = 1;
    for (int i = rank - 1; i >= 0; stride *= shape[i--])
      if (shape[i] > 1 && strides[i] != stride && !empty()) return false;
    return true;
  }
};

/// Returns "(2, 100, 4, 128)", as Python prints a shape.
std::string shape_string(const std::int64_t* shape, int rank);
inline std::string shape_string(const TensorView& t) {
  return shape_string(t.shape.data(), t.rank);
}

}  // namespace flashtile
