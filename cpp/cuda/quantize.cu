#include "flashtile/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <type_traits>

#include "cuda/rounding.h"
#include "flashtile/cuda/divisor.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/params.h"

namespace flashtile {
namespace {

/// Part is one tensor.
struct Part {
  const void* x;
  Strides strides;
  std::uint8_t* numbers;
  float* descale;
  int rows;   // of a head
  int begin;  // the first of its tiles
  bool rotates;
  Divisor heads;
  Divisor blocks;  // of a head

  __device__ std::int64_t head_of_row(int batch, int row, int head) const {
    return (std::int64_t(batch) * rows + row) * heads.value + head;
  }
};

/// Params has tensors of one head dimension, so that what one kernel does before the first tile and after the last
/// happens once for all of them. A tile is a block of rows of one head of one of them.
struct QuantizeParams {
  std::array<Part, 3> parts;
  int count;          // of parts
  int tiles;          // of all
  int block;          // rows
  int chunks;         // of a row
  int side;           // of the Hadamard matrix
  float of_rotation;  // 1 / sqrt(side), by which its product has to be multiplied
  Signs signs;
};

struct Tile {
  int part, batch, block, head;

  static __device__ Tile of(const QuantizeParams& params, int index) {
    int part = 0;
    while (part + 1 < params.count && index >= params.parts[part + 1].begin) ++part;
    const Part& tensor = params.parts[part];
    // Heads come first: neighbouring thread blocks read neighbouring memory.
    const int of_part = index - tensor.begin, of_batch = tensor.heads.quotient(of_part);
    const int batch = tensor.blocks.quotient(of_batch);
    return {part, batch, of_batch - batch * tensor.blocks.value, of_part - of_batch * tensor.heads.value};
  }
};

/// Replaces what is infinite, which has no scale, by NaN, and returns the largest of the thread's other elements.
template <int kCount>
__device__ float without_infinite(float (&x)[kCount]) {
  float largest = 0;
#pragma unroll
  for (float& value : x) {
    value -= fabsf(value) == kInfinite ? value : 0.0f;
    largest = fmaxf(largest, fabsf(value));
  }
  return largest;
}

__device__ void store_descale(const QuantizeParams& params, const Tile& tile, float descale) {
  const Part& part = params.parts[tile.part];
  part.descale[(std::int64_t(tile.batch) * part.heads.value + tile.head) * part.blocks.value + tile.block] =
      part.rotates ? descale * params.of_rotation : descale;
}

// ---- any head dimension

constexpr int kThreads = 256, kRowsAtOnce = kThreads / kSharers;

// A multiprocessor is to have so many thread blocks, as many as registers allow without spilling.
template <int kChunks, int kRows>
constexpr int kBlocks = kChunks * kRows <= 4 ? 4 - kChunks / 4
                        : kChunks == 3       ? 3
                                             : 1;

/// Rounds a tile. A thread block reads its rows once and keeps them.
template <class Element, int kChunks, int kRows>
__global__ void __launch_bounds__(kThreads, kBlocks<kChunks, kRows>)
    quantize_any(const __grid_constant__ QuantizeParams params) {
  const Tile tile = Tile::of(params, int(blockIdx.x));
  const Part& part = params.parts[tile.part];
  const int first_row = tile.block * params.block + int(threadIdx.x) / kSharers;
  const int first_chunk = int(threadIdx.x) % kSharers;
  const auto exists = [&](int r, int c) {
    return first_row + r * kRowsAtOnce < part.rows && first_chunk + kSharers * c < params.chunks;
  };

  uint4 read[kRows][kChunks];  // eight elements each
  const Element* const from = static_cast<const Element*>(part.x) + part.strides.at(tile.batch, first_row) +
                              tile.head * part.strides.head + kChunk * first_chunk;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const Element* const chunk = from + r * kRowsAtOnce * part.strides.row + kChunk * kSharers * c;
      read[r][c] = exists(r, c) ? __ldcs(reinterpret_cast<const uint4*>(chunk)) : uint4{};
    }

  float x[kRows][kChunks][kChunk];
  float largest = 0;
  const int side = part.rotates ? params.side : 1;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    widen_and_rotate<Element>(read[r], x[r], side, params.signs);
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (const float value : x[r][c]) largest = fmaxf(largest, fabsf(value));  // which ignores NaN
  }
  __shared__ unsigned of_warps[2][kThreads / 32];
  largest = largest_of_block(largest, of_warps[0]);
  if (largest == kInfinite) {
    largest = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kChunks; ++c) largest = fmaxf(largest, without_infinite(x[r][c]));
    largest = largest_of_block(largest, of_warps[1]);
  }
  const Scale scale = Scale::of(largest);
  if (threadIdx.x == 0) store_descale(params, tile, scale.descale);
  auto* const to = reinterpret_cast<uint2*>(part.numbers) +
                   part.head_of_row(tile.batch, first_row, tile.head) * params.chunks + first_chunk;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      if (exists(r, c))
        to[std::int64_t(r * kRowsAtOnce) * part.heads.value * params.chunks + kSharers * c] = {
            rounded(x[r][c], scale.inverse), rounded(x[r][c] + 4, scale.inverse)};
}

// ---- head dimensions of 64, 128, 192 and 256

/// RunLayout is who has what of a tile: a thread a run of neighbouring elements of one row, so long that most steps of
/// a rotation need no other thread, and `sharers` neighbouring threads a slab of the row that is rotated by itself.
template <class Element, int kHeadDim, int kRows>
struct RunLayout {
  // Float16 takes more registers to widen: with runs of 128 at a head dimension of 256 they would not suffice.
  static constexpr bool scarce = std::is_same_v<Element, __half> && kHeadDim == 256;
  static constexpr int run = kHeadDim % 128 == 0 && !scarce ? 128 : 64;
  static constexpr int side = kHeadDim & -kHeadDim;
  static constexpr int sharers = side > run ? side / run : 1;
  static constexpr int slab = sharers * run;  // elements
  static constexpr int threads = kRows * kHeadDim / run;
  static constexpr int warp_rows = 32 / sharers;
  static constexpr int warps_of_slab = kRows / warp_rows;
  // Registers hold the tile as floats, and the next one as it is: 64 elements take 96 of them, of 128 at most.
  static constexpr int blocks = std::max(1, 65536 / 2 / run / threads);  // of a multiprocessor
  // A warp has shared memory of its own, where its rows change hands. Between runs there are 16 bytes, so that eight
  // threads that access 16 bytes of a run each meet different banks.
  static constexpr int run_bytes = 2 * run + 16;  // as elements
  static constexpr int out_bytes = run + 16;      // as numbers
  static constexpr int shared_memory = threads * run_bytes;
};

template <class Element>
__device__ float2 widen(unsigned pair) {
  if constexpr (std::is_same_v<Element, __half>)
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  else
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

/// Multiplies a run with the Hadamard matrix, whose steps for bits within the run come first. Loops over bits as a
/// template unroll for certain: an index that is not known would move a run to memory.
template <int kSide, int kBit = 1, int kRun>
__device__ void rotate_run(float (&x)[kRun]) {
  if constexpr (kBit < kSide) {
    if constexpr (kBit < kRun) {
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if ((i & kBit) == 0) add_and_subtract(x[i], x[i + kBit]);
    } else {
      meet_other_thread(x, kBit / kRun);
    }
    rotate_run<kSide, 2 * kBit>(x);
  }
}

/// Returns what changes the signs of the eight elements of a chunk, which have a bit each; two elements a number.
__device__ inline uint4 flips_of(unsigned bits) {
  const auto pair = [&](int i) { return bits << (15 - i) & 1u << 15 | bits << (30 - i) & 1u << 31; };
  return {pair(0), pair(2), pair(4), pair(6)};
}

/// Rounds tile after tile. While a tile is rotated, threads already have the next one under way to registers. Lanes
/// read whole rows, side by side, and write them so; in between shared memory hands each its run.
template <class Element, int kHeadDim, int kRows>
__global__ void __launch_bounds__(RunLayout<Element, kHeadDim, kRows>::threads,
                                  RunLayout<Element, kHeadDim, kRows>::blocks)
    quantize_runs(const __grid_constant__ QuantizeParams params) {
  using Layout = RunLayout<Element, kHeadDim, kRows>;
  constexpr int kRun = Layout::run;
  constexpr int kReaders = Layout::slab / kChunk, kWriters = Layout::slab / 16;  // lanes of a row
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ unsigned of_warps[2][Layout::threads / 32];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  unsigned char* const buffer = memory + warp * 32 * Layout::run_bytes;
  const int slab = warp / Layout::warps_of_slab * Layout::slab;  // its first element
  const int warp_row = warp % Layout::warps_of_slab * Layout::warp_rows;
  const int reader = lane % kReaders, reader_row = lane / kReaders;
  const int writer = lane % kWriters, writer_row = lane / kWriters;
  const int reader_chunk = slab / kChunk + reader;
  const unsigned signs = unsigned(params.signs[reader_chunk / 8] >> (reader_chunk % 8 * 8));

  uint4 next[kRun / kChunk];
  const auto read = [&](const Tile& tile) {
    constexpr int kRowsOfWarp = 32 / kReaders;
    const Part& part = params.parts[tile.part];
    const int row = tile.block * params.block + warp_row + reader_row;
    const Element* from = static_cast<const Element*>(part.x) + part.strides.at(tile.batch, row) +
                          tile.head * part.strides.head + slab + kChunk * reader;
#pragma unroll
    for (int i = 0; i < kRun / kChunk; ++i, from += kRowsOfWarp * part.strides.row)
      next[i] = row + i * kRowsOfWarp < part.rows ? __ldcs(reinterpret_cast<const uint4*>(from)) : uint4{};
  };

  Tile following = Tile::of(params, int(blockIdx.x));
  read(following);
  int buffer_of_warps = 0;
  const auto largest_of_all = [&](float own) { return largest_of_block(own, of_warps[buffer_of_warps ^= 1]); };
  for (int index = int(blockIdx.x); index < params.tiles; index += int(gridDim.x)) {
    const Tile tile = following;
    const Part& part = params.parts[tile.part];
    const uint4 flips = flips_of(part.rotates ? signs : 0);
#pragma unroll
    for (int i = 0; i < kRun / kChunk; ++i) {
      const int run = (i * (32 / kReaders) + reader_row) * Layout::sharers + reader / (kRun / kChunk);
      auto* const to = reinterpret_cast<uint4*>(buffer + run * Layout::run_bytes) + reader % (kRun / kChunk);
      *to = {next[i].x ^ flips.x, next[i].y ^ flips.y, next[i].z ^ flips.z, next[i].w ^ flips.w};
    }
    __syncwarp();  // a warp's lanes wait for each other's rows
    if (index + int(gridDim.x) < params.tiles) {
      following = Tile::of(params, index + int(gridDim.x));
      read(following);
    }
    float x[kRun];
#pragma unroll
    for (int i = 0; i < kRun / kChunk; ++i) {
      const uint4 chunk = reinterpret_cast<const uint4*>(buffer + lane * Layout::run_bytes)[i];
      const unsigned pairs[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = widen<Element>(pairs[j]);
        x[kChunk * i + 2 * j] = pair.x;
        x[kChunk * i + 2 * j + 1] = pair.y;
      }
    }
    if (part.rotates) rotate_run<Layout::side>(x);

    float most[4] = {};  // of every fourth element, so that none waits for the one before
#pragma unroll
    for (int i = 0; i < kRun; ++i) most[i % 4] = fmaxf(most[i % 4], fabsf(x[i]));  // which ignores NaN
    float largest = largest_of_all(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
    if (largest == kInfinite) largest = largest_of_all(without_infinite(x));
    const Scale scale = Scale::of(largest);
    if (threadIdx.x == 0) store_descale(params, tile, scale.descale);

    // No lane of a warp still reads its run: they have been at a barrier since.
    auto* const own = reinterpret_cast<uint4*>(buffer + lane * Layout::out_bytes);
#pragma unroll
    for (int i = 0; i < kRun; i += 16)
      own[i / 16] = {rounded(x + i, scale.inverse), rounded(x + i + 4, scale.inverse),
                     rounded(x + i + 8, scale.inverse), rounded(x + i + 12, scale.inverse)};
    __syncwarp();  // a warp's lanes wait for each other's numbers
    constexpr int kRowsOfWarp = 32 / kWriters;
    const int row = tile.block * params.block + warp_row + writer_row;
    std::uint8_t* to = part.numbers + part.head_of_row(tile.batch, row, tile.head) * kHeadDim + slab + 16 * writer;
#pragma unroll
    for (int i = 0; i < kRun / 16; ++i, to += std::int64_t(kRowsOfWarp) * part.heads.value * kHeadDim) {
      const int run = (i * kRowsOfWarp + writer_row) * Layout::sharers + writer / (kRun / 16);
      const uint4 numbers = reinterpret_cast<const uint4*>(buffer + run * Layout::out_bytes)[writer % (kRun / 16)];
      if (row + i * kRowsOfWarp < part.rows) *reinterpret_cast<uint4*>(to) = numbers;
    }
    __syncwarp();  // lanes write the next tile where others have read numbers
  }
}

// ---- which of them

struct Launch {
  QuantizeParams params;
  Device device;
  int multiprocessors;
  Stream stream;
};

template <class Element, int kChunks, int kRows>
void launch_any(const Launch& l) {
  static KernelHandles handles;
  launch(quantize_any<Element, kChunks, kRows>, handles, l.device, {l.params.tiles, kThreads, 0}, l.params, l.stream);
}

template <class Element, int kHeadDim, int kRows>
void launch_runs(const Launch& l) {
  static KernelHandles handles;
  using Layout = RunLayout<Element, kHeadDim, kRows>;
  const int blocks = std::min(l.params.tiles, Layout::blocks * l.multiprocessors);
  launch(quantize_runs<Element, kHeadDim, kRows>, handles, l.device, {blocks, Layout::threads, Layout::shared_memory},
         l.params, l.stream);
}

template <class Element, int kChunks>
void launch_chunks(const Launch& l) {
  l.params.block > kRowsAtOnce ? launch_any<Element, kChunks, 2>(l) : launch_any<Element, kChunks, 1>(l);
}

template <class Element, int kHeadDim>
void launch_head_dim(const Launch& l) {
  l.params.block > 64 ? launch_runs<Element, kHeadDim, 128>(l) : launch_runs<Element, kHeadDim, 64>(l);
}

template <class Element>
void launch_elements(const Launch& l) {
  switch (l.params.chunks * kChunk) {
    case 64: return launch_head_dim<Element, 64>(l);
    case 128: return launch_head_dim<Element, 128>(l);
    case 192: return launch_head_dim<Element, 192>(l);
    case 256: return launch_head_dim<Element, 256>(l);
  }
  const int chunks = (l.params.chunks + kSharers - 1) / kSharers;  // of a thread
  if (chunks <= 2) return launch_chunks<Element, 2>(l);
  if (chunks <= 3) return launch_chunks<Element, 3>(l);
  if (chunks <= 4) return launch_chunks<Element, 4>(l);
  if (chunks <= 6) return launch_chunks<Element, 6>(l);
  launch_chunks<Element, 8>(l);
}

/// Rounds tensors of one head dimension.
void launch_tensors(std::span<const Quantization> tensors, const QuantizeCall& call, int multiprocessors,
                    Stream stream) {
  const TensorView& first = tensors[0].x;
  const int head_dim = static_cast<int>(first.shape[3]), side = head_dim & -head_dim;
  Launch l{.params = {.parts = {},
                      .count = 0,
                      .tiles = 0,
                      .block = call.block,
                      .chunks = head_dim / kChunk,
                      .side = side,
                      .of_rotation = 1 / std::sqrt(static_cast<float>(side)),
                      .signs = call.signs},
           .device = first.device,
           .multiprocessors = multiprocessors,
           .stream = stream};
  for (const Quantization& tensor : tensors) {
    const TensorView& x = tensor.x;
    if (x.empty()) continue;
    const auto size = [&](int i) { return static_cast<int>(x.shape[i]); };
    const int blocks = (size(1) + call.block - 1) / call.block;
    l.params.parts[l.params.count++] = {.x = x.data,
                                        .strides = Strides::of(x),
                                        .numbers = static_cast<std::uint8_t*>(tensor.numbers.data),
                                        .descale = static_cast<float*>(tensor.descale.data),
                                        .rows = size(1),
                                        .begin = l.params.tiles,
                                        .rotates = tensor.rotates,
                                        .heads = Divisor(size(2)),
                                        .blocks = Divisor(blocks)};
    l.params.tiles += size(0) * size(2) * blocks;
  }
  if (l.params.tiles == 0) return;
  first.dtype == DType::kFloat16 ? launch_elements<__half>(l) : launch_elements<__nv_bfloat16>(l);
}

}  // namespace

void launch_quantize(const QuantizeCall& call, int multiprocessors, Stream stream) {
  const std::span<const Quantization> tensors = call.tensors;
  std::size_t begin = 0;
  for (std::size_t i = 1; i <= tensors.size(); ++i) {
    if (i < tensors.size() && tensors[i].x.shape[3] == tensors[begin].x.shape[3]) continue;
    launch_tensors(tensors.subspan(begin, i - begin), call, multiprocessors, stream);
    begin = i;
  }
}

}  // namespace flashtile
