// The device memory that the kernels of one backward call share.
#pragma once

#include <cstdint>

#include "flashtile/macros.h"
#include "flashtile/problem.h"
#include "flashtile/variant.h"

namespace flashtile {

/// Tiles of tile_m query rows of each (batch, query head), the last of a head filled up:
///
///   lse_log2   a float a row: the forward's lse in log2 units; +inf for rows that see nothing or do not exist, so that
///              their weights come out as 0
///   delta      a float a row: Σ dO∘O − dlse; 0 for those rows
///   dq         tile_m · head_dim floats a tile, where the gradients of all key blocks add up, before the scale; their
///              order within a tile is the kernel's own. None where a pass of its own forms dQ
///   state      an int for each part of a tile of dq: how far its sum is, see SumOfDq. None where blocks of keys add to
///              zeros in any order
struct BackwardWorkspace {
  std::int64_t tiles = 0;
  int tile_m = 0;
  int head_dim = 0;  // 0: no dq
  int parts = 0;     // 0: no state

  static BackwardWorkspace of(const Problem& p, const Variant& v) {
    const std::int64_t m_blocks = (p.seqlen_q + v.tile_m - 1) / v.tile_m;
    return {m_blocks * p.batch * p.heads_q, v.tile_m, v.two_passes() ? 0 : v.head_dim,
            p.deterministic || v.arch == Arch::kSm90 ? v.parts_of_dq() : 0};
  }

  FLASHTILE_HOST_DEVICE std::int64_t rows() const { return tiles * tile_m; }
  FLASHTILE_HOST_DEVICE std::int64_t bytes() const { return 4 * (rows() * (2 + head_dim) + tiles * parts); }
  FLASHTILE_HOST_DEVICE float* lse_log2(void* base) const { return static_cast<float*>(base); }
  FLASHTILE_HOST_DEVICE float* delta(void* base) const { return lse_log2(base) + rows(); }
  FLASHTILE_HOST_DEVICE float* dq(void* base) const { return delta(base) + rows(); }
  FLASHTILE_HOST_DEVICE int* state(void* base) const { return reinterpret_cast<int*>(dq(base) + rows() * head_dim); }
};

}  // namespace flashtile
