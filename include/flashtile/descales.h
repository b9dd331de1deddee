// This file says where the factors of e4m3 numbers are: those with which the rows of a head are multiplied.
#pragma once

#include <cstdint>
#include <limits>

#include "flashtile/macros.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// Returns log2 of the rows that share a descale, or 31 where all rows of a head do: `t` is (B, H, ceil(rows / block))
/// with blocks of 128 or 64 rows, or (B, H).
constexpr int log2_of_block(const TensorView& t, std::int64_t rows) {
  if (t.rank < 3) return 31;
  return t.shape[2] == (rows + 127) / 128 ? 7 : 6;
}

/// Returns what a kernel takes a descale for. Numbers below 2^-60 count as that, so that no score of −inf is multiplied
/// with 0, and those below 0 count as NaN.
inline constexpr float kLog2OfNoDescale = -60;
FLASHTILE_HOST_DEVICE float usable_descale(float x) {
  constexpr float kLeast = 0x1p-60f;  // 2^kLog2OfNoDescale
  return x >= kLeast ? x : x >= 0 ? kLeast : x * std::numeric_limits<float>::quiet_NaN();
}

/// Descales are those of one tensor. None is 1 for all.
struct Descales {
  const float* data = nullptr;
  std::int64_t batch = 0, head = 0, block = 0;  // strides
  int log2_block = 31;
  int heads = 1;  // so many heads of the tensor have the same

  /// `rows` are those of an entry of the batch, and the tensor has `heads` heads.
  static Descales of(const TensorView& t, std::int64_t rows, int heads) {
    if (!t.given()) return {};
    const int shared = t.shape[1] > 0 ? heads / static_cast<int>(t.shape[1]) : 1;
    return {static_cast<const float*>(t.data), t.strides[0],           t.strides[1],
            t.rank < 3 ? 0 : t.strides[2],     log2_of_block(t, rows), shared > 0 ? shared : 1};
  }

  /// Returns where those of a head are. The way there has a division, so a kernel goes it once for all rows: a thread
  /// that loads tiles, and went it with every block of keys, kept all others waiting.
  FLASHTILE_HOST_DEVICE const float* of_head(int batch_index, int head_index) const {
    return data == nullptr ? nullptr : data + batch_index * batch + head_index / heads * head;
  }
  FLASHTILE_HOST_DEVICE float at(const float* of_head, int row) const {
    return of_head == nullptr ? 1 : of_head[(row >> log2_block) * block];
  }
};

}  // namespace flashtile
