// This file rounds queries, keys and values to fp8 (e4m3): block by block with a scale of its own, after a random
// rotation of queries and keys (FlashAttention-3, arXiv 2407.08608, section 3.3).
#pragma once

#include <array>
#include <cstdint>

#include "flashtile/plan.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// Signs has a bit for each element of a row: which of them change their sign ahead of a rotation.
using Signs = std::array<std::uint64_t, 4>;  // of 64 elements each

/// Quantization is one tensor of a call. A block is `block` neighbouring rows of a head of a batch entry; the last one
/// may be shorter. An element is its e4m3 number times the descale of its block.
struct Quantization {
  TensorView x;        // (B, S, H, D), float16 or bfloat16
  TensorView numbers;  // four of them in an int32 (B, S, H, D / 4), contiguous
  TensorView descale;  // (B, H, ceil(S / block)) float32, contiguous
  // Signs change and rows are multiplied with a Hadamard matrix, which is orthogonal, or else nothing happens. The
  // matrix has a side of the largest power of two that divides D, and neighbouring elements are multiplied together.
  bool rotates = false;
};

/// QuantizeCall is queries, keys and values of one dtype on one device, which one kernel rounds where they have one D.
struct QuantizeCall {
  std::array<Quantization, 3> tensors;
  int block = 128;  // or 64
  Signs signs{};
};

/// RaggedQuantization is one tensor of a ragged batch, whose blocks are the sequences.
struct RaggedQuantization {
  TensorView x;        // (T, H, D), float16 or bfloat16
  TensorView begins;   // (B + 1) int32: where each sequence begins, and where the last one ends
  TensorView numbers;  // four of them in an int32 (T, H, D / 4), contiguous; 0 behind the last sequence
  TensorView descale;  // (B, H) float32, contiguous; 0 before the call, and after it for empty sequences
  TensorView largest;  // (B, H) int32, contiguous, scratch; 0 before the call
  bool rotates = false;
  Signs signs{};
};

/// These run on a GPU. What `function` was asked for has to be as it stands above but for the memory of x, of which
/// they throw Unreadable where 16 bytes cannot be read at a time.
void quantize(const char* function, const QuantizeCall& call, const DeviceInfo& device, Stream stream);
void quantize(const char* function, const RaggedQuantization& quantization, Stream stream);

}  // namespace flashtile
