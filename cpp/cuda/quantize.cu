#include "flashtile/quantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>

#include "flashtile/cuda/launch.h"
#include "flashtile/params.h"

namespace flashtile {
namespace {

// Four threads share a row. A chunk is eight neighbouring elements, which a thread reads at once; thread t of the four
// has chunks t, t + 4, and so on.
constexpr int kThreads = 256, kSharers = 4, kRowsAtOnce = kThreads / kSharers, kChunk = 8;
constexpr float kLargest = 448;      // of e4m3
constexpr float kLeast = 0x1p-126f;  // descale, so that its inverse is finite
constexpr float kInfinite = __builtin_huge_valf();

struct QuantizeParams {
  const void* x;
  Strides strides;
  std::uint8_t* numbers;
  float* descale;
  int rows;  // of a head
  int heads;
  int chunks;  // of a row
  int block;
  int blocks;         // of a head
  int side;           // of the Hadamard matrix, or 1 where nothing is rotated
  float of_rotation;  // 1 / sqrt(side), by which its product has to be multiplied
  Signs signs;
};

/// Replaces a and b by their sum and their difference.
__device__ void add_and_subtract(float& a, float& b) {
  const float difference = a - b;
  a += b;
  b = difference;
}

/// Multiplies a thread's share of a row with the Hadamard matrix, which has as many steps as its side has bits: in each
/// of them elements whose indices differ in one bit meet. Bits 0 to 2 are those within a chunk, 3 and 4 say which
/// thread of the four it is, and the others which of its chunks.
template <int kChunks>
__device__ void rotate(float (&x)[kChunks][kChunk], int side) {
#pragma unroll
  for (int bit = 1; bit < kChunk; bit *= 2)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if ((i & bit) == 0) add_and_subtract(x[c][i], x[c][i + bit]);
#pragma unroll
  for (int bit = 1; bit < kSharers; bit *= 2) {
    if (side <= kChunk * bit) return;
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float other = __shfl_xor_sync(0xffffffff, x[c][i], bit);
        x[c][i] = other + (upper ? -x[c][i] : x[c][i]);
      }
  }
#pragma unroll
  for (int bit = 1; bit < kChunks; bit *= 2) {
    if (side <= kChunk * kSharers * bit) return;
#pragma unroll
    for (int c = 0; c + bit < kChunks; ++c)
      if ((c & bit) == 0)
#pragma unroll
        for (int i = 0; i < kChunk; ++i) add_and_subtract(x[c][i], x[c + bit][i]);
  }
}

/// Returns the largest value of all threads; none is negative.
__device__ float largest_of_block(float own) {
  __shared__ unsigned of_warps[kThreads / 32];
  const unsigned of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(own));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();  // all threads wait for the warps' largest values
  unsigned most = 0;
  for (const unsigned warp : of_warps) most = max(most, warp);
  return __uint_as_float(most);
}

/// Rounds a block of rows of one head, by a thread block. A thread block reads its rows once and keeps them.
template <class Element, int kChunks, int kRows>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ QuantizeParams params) {
  // Heads come first: neighbouring thread blocks read neighbouring memory.
  const int head = int(blockIdx.x) % params.heads, of_batch = int(blockIdx.x) / params.heads;
  const int block = of_batch % params.blocks, batch = of_batch / params.blocks;
  const int sharer = threadIdx.x % kSharers;
  const auto row = [&](int r) { return block * params.block + r * kRowsAtOnce + int(threadIdx.x) / kSharers; };
  const auto chunk = [&](int c) { return sharer + kSharers * c; };
  const auto exists = [&](int r, int c) { return row(r) < params.rows && chunk(c) < params.chunks; };

  uint4 read[kRows][kChunks];  // eight elements each
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const Element* const from = static_cast<const Element*>(params.x) + params.strides.at(batch, row(r)) +
                                  head * params.strides.head + kChunk * chunk(c);
      read[r][c] = exists(r, c) ? __ldcs(reinterpret_cast<const uint4*>(from)) : uint4{};
    }

  float x[kRows][kChunks][kChunk];
  float largest = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const auto* const elements = reinterpret_cast<const Element*>(&read[r][c]);
      const unsigned signs = params.side > 1 ? unsigned(params.signs[chunk(c) / 8] >> (chunk(c) % 8 * 8)) : 0;
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        x[r][c][i] = __uint_as_float(__float_as_uint(float(elements[i])) ^ (signs << (31 - i) & 1u << 31));
    }
    if (params.side > 1) rotate(x[r], params.side);
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (const float value : x[r][c]) largest = fmaxf(largest, fabsf(value));  // which ignores NaN
  }
  largest = largest_of_block(largest);
  if (largest == kInfinite) {  // what is infinite has no scale, and becomes NaN
    largest = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (float& value : x[r][c]) {
          value -= fabsf(value) == kInfinite ? value : 0.0f;
          largest = fmaxf(largest, fabsf(value));
        }
    __syncthreads();  // all threads have read what the other largest_of_block() returned
    largest = largest_of_block(largest);
  }
  const float descale = largest == 0 ? 0.0f : fmaxf(__fdiv_rn(largest, kLargest), kLeast);
  const float scale = largest == 0 ? 0.0f : __fdiv_rn(1.0f, descale);
  if (threadIdx.x == 0)
    params.descale[(std::int64_t(batch) * params.heads + head) * params.blocks + block] = descale * params.of_rotation;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!exists(r, c)) continue;
      const auto pair = [&](int i) {
        return unsigned(
            __nv_cvt_float2_to_fp8x2({x[r][c][i] * scale, x[r][c][i + 1] * scale}, __NV_SATFINITE, __NV_E4M3));
      };
      const std::int64_t at =
          ((std::int64_t(batch) * params.rows + row(r)) * params.heads + head) * params.chunks + chunk(c);
      reinterpret_cast<uint2*>(params.numbers)[at] = {pair(0) | pair(2) << 16, pair(4) | pair(6) << 16};
    }
}

template <class Element, int kChunks, int kRows>
void launch_rows(const Quantization& quantization, const QuantizeParams& params, Stream stream) {
  static KernelHandles handles;
  const TensorView& x = quantization.x;
  const int grid = static_cast<int>(x.shape[0] * params.heads * params.blocks);
  launch(quantize_kernel<Element, kChunks, kRows>, handles, x.device, {grid, kThreads, 0}, params, stream);
}

template <class Element, int kChunks>
void launch_chunks(const Quantization& quantization, const QuantizeParams& params, Stream stream) {
  if (params.block > kRowsAtOnce)
    launch_rows<Element, kChunks, 2>(quantization, params, stream);
  else
    launch_rows<Element, kChunks, 1>(quantization, params, stream);
}

template <class Element>
void launch_elements(const Quantization& quantization, const QuantizeParams& params, Stream stream) {
  const int chunks = (params.chunks + kSharers - 1) / kSharers;  // of a thread
  if (chunks <= 1) return launch_chunks<Element, 1>(quantization, params, stream);
  if (chunks <= 2) return launch_chunks<Element, 2>(quantization, params, stream);
  if (chunks <= 3) return launch_chunks<Element, 3>(quantization, params, stream);
  if (chunks <= 4) return launch_chunks<Element, 4>(quantization, params, stream);
  if (chunks <= 6) return launch_chunks<Element, 6>(quantization, params, stream);
  launch_chunks<Element, 8>(quantization, params, stream);
}

}  // namespace

void launch_quantize(const Quantization& quantization, Stream stream) {
  const TensorView& x = quantization.x;
  if (x.empty()) return;
  const auto size = [&](int i) { return static_cast<int>(x.shape[i]); };
  const int side = quantization.rotates ? size(3) & -size(3) : 1;
  const QuantizeParams params{.x = x.data,
                              .strides = Strides::of(x),
                              .numbers = static_cast<std::uint8_t*>(quantization.numbers.data),
                              .descale = static_cast<float*>(quantization.descale.data),
                              .rows = size(1),
                              .heads = size(2),
                              .chunks = size(3) / kChunk,
                              .block = quantization.block,
                              .blocks = (size(1) + quantization.block - 1) / quantization.block,
                              .side = side,
                              .of_rotation = 1 / std::sqrt(static_cast<float>(side)),
                              .signs = quantization.signs};
  if (x.dtype == DType::kFloat16)
    launch_elements<__half>(quantization, params, stream);
  else
    launch_elements<__nv_bfloat16>(quantization, params, stream);
}

}  // namespace flashtile
