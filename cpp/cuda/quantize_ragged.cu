#include <cmath>

#include "cuda/rounding.h"
#include "flashtile/cuda/divisor.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/params.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256, kRows = kThreads / kSharers;  // of a thread block, which may be of several sequences

struct RaggedParams {
  const void* x;
  Strides strides;
  std::uint8_t* numbers;
  float* descale;
  unsigned* largest;  // as bits: of numbers that are not negative, these have the same order
  const int* begins;
  int sequences;
  int rows;  // T
  Divisor heads;
  int chunks;         // of a row
  int side;           // of the Hadamard matrix, or 1 where nothing is rotated
  float of_rotation;  // 1 / sqrt(side), by which its product has to be multiplied
  Signs signs;
};

/// Returns the sequence of a row, or -1 behind the last one. No table makes it read elsewhere.
__device__ int sequence_of(const RaggedParams& params, int row) {
  int low = 0, high = params.sequences;  // sequences from `high` on begin behind the row
  while (low < high) {
    const int middle = (low + high) / 2;
    if (params.begins[middle + 1] <= row)
      low = middle + 1;
    else
      high = middle;
  }
  return row >= 0 && low < params.sequences ? low : -1;
}

enum class Pass { kMaximum, kRounding };

/// Finds the largest finite elements of sequences and heads, or rounds them by what that has found.
template <class Element, int kChunks, Pass kPass>
__global__ void __launch_bounds__(kThreads) quantize_ragged(const __grid_constant__ RaggedParams params) {
  // Heads come first: neighbouring thread blocks read neighbouring memory.
  const int block = params.heads.quotient(int(blockIdx.x)), head = int(blockIdx.x) - block * params.heads.value;
  const int row = block * kRows + int(threadIdx.x) / kSharers, sharer = int(threadIdx.x) % kSharers;
  const int sequence = row < params.rows ? sequence_of(params, row) : -1;

  uint4 read[kChunks];
  float x[kChunks][kChunk];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = sharer + kSharers * c;
    const Element* const from =
        static_cast<const Element*>(params.x) + params.strides.at(0, row) + head * params.strides.head + kChunk * chunk;
    read[c] = sequence >= 0 && chunk < params.chunks ? *reinterpret_cast<const uint4*>(from) : uint4{};
  }
  widen_and_rotate<Element>(read, x, params.side, params.signs);

  const auto place = [&](int of) { return std::int64_t(of) * params.heads.value + head; };
  if constexpr (kPass == Pass::kMaximum) {
    float largest = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (const float value : x[c])
        if (fabsf(value) < kInfinite) largest = fmaxf(largest, fabsf(value));
    __shared__ int first;
    __shared__ unsigned of_warps[kThreads / 32];
    if (threadIdx.x == 0) first = sequence;
    __syncthreads();  // all threads wait for thread 0's sequence
    // One thread adds what all rows have in common. Few blocks have rows of several sequences.
    const bool common = __syncthreads_and(sequence == first) != 0;
    if (common) largest = largest_of_block(largest, of_warps);
    if (sequence >= 0 && largest > 0 && (threadIdx.x == 0 || !common))
      atomicMax(params.largest + place(sequence), __float_as_uint(largest));
  } else {
    if (row >= params.rows) return;
    const Scale scale = sequence >= 0 ? Scale::of(__uint_as_float(params.largest[place(sequence)])) : Scale{0, 0};
    if (sequence >= 0 && sharer == 0 && params.begins[sequence] == row)
      params.descale[place(sequence)] = scale.descale * params.of_rotation;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int chunk = sharer + kSharers * c;
      if (chunk >= params.chunks) continue;
#pragma unroll
      for (float& value : x[c]) value -= fabsf(value) == kInfinite ? value : 0.0f;  // which has no scale: NaN
      const std::int64_t at = (std::int64_t(row) * params.heads.value + head) * params.chunks + chunk;
      const uint2 numbers = {rounded(x[c], scale.inverse), rounded(x[c] + 4, scale.inverse)};
      reinterpret_cast<uint2*>(params.numbers)[at] = sequence >= 0 ? numbers : uint2{};  // those could be -0
    }
  }
}

template <class Element, int kChunks>
void launch_passes(const RaggedParams& params, Device device, Stream stream) {
  static KernelHandles of_maximum, of_rounding;
  const int blocks = (params.rows + kRows - 1) / kRows * params.heads.value;
  launch(quantize_ragged<Element, kChunks, Pass::kMaximum>, of_maximum, device, {blocks, kThreads, 0}, params, stream);
  launch(quantize_ragged<Element, kChunks, Pass::kRounding>, of_rounding, device, {blocks, kThreads, 0}, params,
         stream);
}

template <class Element>
void launch_elements(const RaggedParams& params, Device device, Stream stream) {
  const int chunks = (params.chunks + kSharers - 1) / kSharers;  // of a thread
  if (chunks <= 2) return launch_passes<Element, 2>(params, device, stream);
  if (chunks <= 4) return launch_passes<Element, 4>(params, device, stream);
  launch_passes<Element, 8>(params, device, stream);
}

}  // namespace

void launch_quantize_ragged(const RaggedQuantization& quantization, Stream stream) {
  const TensorView x = quantization.x.with_batch();
  if (x.empty()) return;
  const auto size = [&](int i) { return static_cast<int>(x.shape[i]); };
  const int side = quantization.rotates ? size(3) & -size(3) : 1;
  const RaggedParams params{.x = x.data,
                            .strides = Strides::of(x),
                            .numbers = static_cast<std::uint8_t*>(quantization.numbers.data),
                            .descale = static_cast<float*>(quantization.descale.data),
                            .largest = static_cast<unsigned*>(quantization.largest.data),
                            .begins = static_cast<const int*>(quantization.begins.data),
                            .sequences = static_cast<int>(quantization.begins.shape[0]) - 1,
                            .rows = size(1),
                            .heads = Divisor(size(2)),
                            .chunks = size(3) / kChunk,
                            .side = side,
                            .of_rotation = 1 / std::sqrt(static_cast<float>(side)),
                            .signs = quantization.signs};
  if (x.dtype == DType::kFloat16)
    launch_elements<__half>(params, x.device, stream);
  else
    launch_elements<__nv_bfloat16>(params, x.device, stream);
}

}  // namespace flashtile
