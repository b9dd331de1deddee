// This file says how much shared memory forward kernels take, and for what Hopper's takes it.
#pragma once

#include "flashtile/variant.h"

namespace flashtile {

inline constexpr int kMostSharedMemory = 227 * 1024;  // bytes that a thread block of Hopper may have

/// This is the shared memory of Hopper's forward kernel. It has two tiles of Q where they fit, so that the next one is
/// loaded while the last is still in use. Where that fits too, the output is staged for TMA to store it, which takes
/// fewer instructions than to store it from registers: those of the first epilogue come from memory, all at once. Under
/// a column mask there are 16 bytes for each column of a block at an edge, of two such blocks where they fit. Each tile
/// of V of 8 bits is there a second time, transposed: matmuls take bytes in no other way. And where keys and values of
/// 8 bits meet queries of 16, tiles of both are there as they come, and once more, widened.
struct ForwardMemorySm90 {
  int stages_q = 1;
  int stages_k = 0, stages_v = 0;
  int stages_of_rows = 0;  // of V as it comes, where its tiles are transposed, and of K too, where both are widened
  bool staged = false;
  int bytes = 0;
  int stages_of_columns = 1;
  int masked_bytes = 0;

  static constexpr ForwardMemorySm90 of(const Variant& v, bool widens = false) {
    constexpr int kMostOfRows = 3;
    constexpr int kBarriers = 3072;  // barriers, and what the scheduler warp tells the others of each tile
    const int q = bytes_of(v.dtype) * v.tile_m * v.head_dim;
    const int out = 2 * v.tile_m * v.head_dim_v;
    ForwardMemorySm90 memory;
    memory.stages_k = memory.stages_v = v.stages / 2;
    if (v.fp8()) {  // K and the rows of V come from far away, and transposed tiles are made of what is near
      memory.stages_k = memory.stages_of_rows = (v.stages + 2) / 3;
      memory.stages_v = v.stages - 2 * memory.stages_k;
    }
    memory.bytes = kBarriers + q +
                   bytes_of(v.dtype) * v.tile_n *
                       (memory.stages_k * v.head_dim + (memory.stages_v + memory.stages_of_rows) * v.head_dim_v);
    if (widens) {
      const int rows = v.tile_n * (v.head_dim + v.head_dim_v);
      while (memory.stages_of_rows < kMostOfRows && memory.bytes + rows <= kMostSharedMemory)
        ++memory.stages_of_rows, memory.bytes += rows;
    }
    if (v.fp8()) memory.staged = true, memory.bytes += out;  // LongSums are there, too
    if (memory.bytes + q <= kMostSharedMemory) memory.stages_q = 2, memory.bytes += q;
    if (!v.fp8() && memory.bytes + out <= kMostSharedMemory) memory.staged = true, memory.bytes += out;
    memory.masked_bytes = memory.bytes;
    // The columns of one block have the place that ragged sequences have without a mask. The second block needs more
    // than its own bytes where largest logits are found, too, and what kBarriers has is used up.
    constexpr int kOfLargest = 1024;
    const int columns = 16 * v.tile_n + (v.knows(Features::kMaxLogits) ? kOfLargest : 0);
    if (memory.bytes + columns <= kMostSharedMemory) memory.stages_of_columns = 2, memory.masked_bytes += columns;
    return memory;
  }
};

/// Returns the bytes of shared memory of a CUDA forward kernel: on Ampere a tile of Q and the ring of K and V tiles.
constexpr int forward_shared_memory(const Variant& v, bool column_masked = false) {
  if (v.arch == Arch::kSm90)
    return column_masked ? ForwardMemorySm90::of(v).masked_bytes : ForwardMemorySm90::of(v).bytes;
  return bytes_of(v.dtype) * v.head_dim * (v.tile_m + v.stages * v.tile_n);
}

}  // namespace flashtile
