// This file rounds queries, keys and values to fp8 (e4m3): block by block with a scale of its own, after a random
// rotation of queries and keys (FlashAttention-3, arXiv 2407.08608, section 3.3).
#pragma once

#include <array>
#include <cstdint>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// Signs has a bit for each element of a row: which of them change their sign ahead of a rotation.
using Signs = std::array<std::uint64_t, 4>;  // of 64 elements each

/// Quantization is one call. A block is `block` neighbouring rows of a head of a batch entry; the last one may be
/// shorter. An element is its e4m3 number times the descale of its block.
struct Quantization {
  TensorView x;        // (B, S, H, D), float16 or bfloat16
  TensorView numbers;  // four of them in an int32 (B, S, H, D / 4), contiguous
  TensorView descale;  // (B, H, ceil(S / block)) float32, contiguous
  int block = 128;     // or 64
  // Signs change and rows are multiplied with a Hadamard matrix, which is orthogonal, or else nothing happens. The
  // matrix has a side of the largest power of two that divides D, and neighbouring elements are multiplied together.
  bool rotates = false;
  Signs signs{};
};

/// Runs it on a GPU. What `function` was asked for has to be as it stands above but for the memory of x, of which it
/// throws Unreadable where 16 bytes cannot be read at a time.
void quantize(const char* function, const Quantization& quantization, Stream stream);

}  // namespace flashtile
