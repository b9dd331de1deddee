// This file lists the blocks of rows of ragged sequences, longest first, in places (see RaggedPart).
#pragma once

#include "flashtile/scheduler/parts.h"

namespace flashtile {

/// Returns the class of a length: the first class has the longest. There are eight classes to an octave, by the
/// exponent of the length and three bits of its mantissa.
__device__ inline int class_of(int length) {
  constexpr int kClasses = RaggedOrder::kClasses;
  return length <= 0 ? kClasses - 1 : (kClasses - 2) - ((__float_as_int(float(length)) >> 20) - (127 << 3));
}

/// Turns the number of places that each class takes into the place where it begins: an exclusive prefix sum. All
/// threads of a block call it.
__device__ inline void places_from_counts(int (&places)[RaggedOrder::kClasses], RaggedTiles const& tiles) {
  if (threadIdx.x < 32) {
    constexpr int kOfLane = RaggedOrder::kClasses / 32;
    int* const own = places + threadIdx.x * kOfLane;
    int sum = 0;
    for (int i = 0; i < kOfLane; ++i) sum += own[i];
    int before = sum;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffff, before, distance);
      if (int(threadIdx.x) >= distance) before += other;
    }
    if (threadIdx.x == 31) {
      *tiles.listed = before;
      *tiles.taken = 0;
    }
    before -= sum;
    for (int i = 0; i < kOfLane; ++i) {
      const int count = own[i];
      own[i] = before;
      before += count;
    }
  }
  __syncthreads();  // all threads wait for the first warp's sums
}

/// One thread block, of kClasses threads at least, sorts parts by the work of their longest block: a counting sort.
///
/// Where tables break the rules it lists nothing: sequences that overlap may need more places than there are, and their
/// blocks might wait for each other.
__device__ inline void list_tiles(Sequences const& sequences, RaggedOrder const& order) {
  constexpr int kClasses = RaggedOrder::kClasses;
  const bool of_keys = order.of == RaggedOrder::Of::kKeys;
  __shared__ int places[kClasses];  // how many each class has; then where its next part begins
  if (threadIdx.x < kClasses) places[threadIdx.x] = 0;
  bool legal = true;
  for (int b = threadIdx.x; b <= sequences.q.batch; b += int(blockDim.x))
    legal &= is_legal(sequences.q, b) && is_legal(sequences.k, b);
  if (__syncthreads_or(!legal)) {
    if (threadIdx.x == 0) *order.tiles.listed = 0;
    return;
  }

  const int entries = sequences.q.entries();
#pragma unroll 1
  for (bool counted = false;; counted = true) {  // twice: parts are counted, then listed
    for (int i = threadIdx.x; i < entries * order.parts; i += int(blockDim.x)) {
      const int part = i / entries, b = i - part * entries;
      const Sequence sequence = sequences.at(b);
      const int all = Spans::tiles(of_keys ? sequence.k.size : sequence.q.size, order.rows.value);
      const Range blocks = blocks_of_part(all, part, order.parts, !of_keys);
      if (blocks.empty()) continue;
      const int count = blocks.end - blocks.begin;
      const int length = length_of(order, sequence, of_keys ? blocks.begin : blocks.end - 1);
      const int first = atomicAdd(&places[class_of(length)], count);
      if (!counted) continue;
      const RaggedEntry entry{{first, b, blocks.begin, count, heads_at_once(order, all)}, all, sequence};
#pragma unroll 1
      for (int place = first; place < first + count; ++place) order.tiles.list[place] = entry;
    }
    if (counted) return;
    __syncthreads();  // all threads have counted their parts
    places_from_counts(places, order.tiles);
  }
}

}  // namespace flashtile
