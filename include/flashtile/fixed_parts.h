// This file says how batch-invariant calls divide keys on Hopper: into parts of a fixed length, which are joined in
// their order.
#pragma once

#include <cstdint>

#include "flashtile/cuda/divisor.h"
#include "flashtile/forward_memory.h"
#include "flashtile/forward_parts.h"
#include "flashtile/mask/mask.h"
#include "flashtile/plan.h"

namespace flashtile {

/// Returns how many keys a part has. Part n has those from key n · keys_of_part on, whatever tile, batch or call they
/// are seen from, so that each row's results over parts, and their sum, have the same bits everywhere. Long parts cost
/// less to join, short ones let more thread blocks share a sequence.
constexpr int keys_of_part(const Variant& v) {
  constexpr int kKeys = 1024;
  return (kKeys + v.tile_n - 1) / v.tile_n * v.tile_n;
}

/// Returns whether a row is made for tiles of few queries. Over keys in rows it serves those that are shared out, and
/// no others.
constexpr bool has_few_queries(const Variant& v) {
  return v.tile_m == 64;
}

/// Returns whether thread blocks may share the parts of a tile: not of the tallest, as few calls have few of them.
constexpr bool may_share_tiles(const Variant& v) {
  return v.tile_m <= 128;
}

/// Returns how many parts so many keys have.
constexpr int fixed_parts(const Variant& v, int keys) {
  return (keys + keys_of_part(v) - 1) / keys_of_part(v);
}

/// This is the shared memory of the kernel. Where it has room for the sum of the parts before, that comes before a
/// second tile of Q, and the output is staged in its place.
struct FixedPartsMemory : ForwardMemorySm90 {
  int bytes_of_sums = 0;  // 0: they lie in memory

  static constexpr FixedPartsMemory of(const Variant& v) {
    FixedPartsMemory memory{ForwardMemorySm90::of(v)};
    const int q = bytes_of(v.dtype) * v.tile_m * v.head_dim, out = 2 * v.tile_m * v.head_dim_v;
    const int least = memory.bytes - (memory.stages_q - 1) * q - (memory.staged ? out : 0);
    const int sums = 4 * v.tile_m * v.head_dim_v;
    if (least + sums > kMostSharedMemory) return memory;
    memory.staged = true;
    memory.bytes_of_sums = sums;
    memory.stages_q = least + sums + q <= kMostSharedMemory ? 2 : 1;
    memory.bytes = least + sums + (memory.stages_q - 1) * q;
    return memory;
  }
};

/// FixedParts are the parts of a tile's keys, as a kernel is given them. Either a thread block goes through all of
/// them, and adds each to a sum of those before, which does not fit into registers and stays in memory. Or the parts
/// are shared out among thread blocks, which leave the result over each in ForwardParts for another kernel to join.
struct FixedParts {
  Divisor shares = Divisor(1);  // thread blocks that share a tile
  int of_share = 0;             // parts that each of them has
  int keys = 0;                 // of a part
  float* sums = nullptr;        // (warps, head_dim_v / 8, 32, 4), where shared memory has no room for them

  /// `keys_of_sequence` is the most that a sequence has.
  static FixedParts of(const ForwardPlan& plan, int keys_of_sequence, void* memory) {
    const int parts = fixed_parts(plan.variant, keys_of_sequence);
    FixedParts fixed;
    fixed.shares = Divisor(plan.splits);
    fixed.of_share = (parts + plan.splits - 1) / plan.splits;
    fixed.keys = keys_of_part(plan.variant);
    if (plan.splits == 1) fixed.sums = reinterpret_cast<float*>(static_cast<char*>(memory) + plan.parts_at);
    return fixed;
  }

  /// Returns where results over parts lie, of each tile one for each part of the longest sequence.
  static ForwardParts results(const ForwardPlan& plan, int keys_of_sequence, void* memory) {
    if (plan.splits == 1) return {};
    ForwardPlan of_parts = plan;
    of_parts.splits = fixed_parts(plan.variant, keys_of_sequence);
    of_parts.tiles = plan.tiles / plan.splits * of_parts.splits;
    return ForwardParts::of(of_parts, memory);
  }

  /// Returns the bytes of what lies at plan.parts_at.
  static std::int64_t bytes(const ForwardPlan& plan, int keys_of_sequence) {
    const Variant& v = plan.variant;
    const int parts = fixed_parts(v, keys_of_sequence);
    const std::int64_t of_row = std::int64_t{4} * v.head_dim_v;
    if (plan.splits == 1)
      return parts > 1 && FixedPartsMemory::of(v).bytes_of_sums == 0 ? of_row * plan.grid * v.tile_m : 0;
    return plan.tiles / plan.splits * parts * v.tile_m * (of_row + std::int64_t{sizeof(RowState)});
  }

  /// Keeps what a share has of the blocks that a tile visits, the first of which begins at a multiple of kN keys.
  template <int kN>
  FLASHTILE_HOST_DEVICE void take(int share, VisibleKeys<kN>& those) const {
    const int blocks_of_share = of_share * (keys / kN), begin = share * blocks_of_share - those.first / kN;
    those.keep({begin, begin + blocks_of_share});
  }
};

}  // namespace flashtile
