// This file lays out the device memory that the kernels of one backward call share.
#pragma once

#include <cstdint>

#include "flashtile/macros.h"
#include "flashtile/problem.h"
#include "flashtile/scheduler/ragged.h"
#include "flashtile/variant.h"

namespace flashtile {

/// The workspace holds tiles of tile_m query rows of each (batch, query head); the last tile of a head is padded. Steep
/// rows, those with large scores, are defined in math/state.h.
///
///   lse_log2   a float a row: the forward's lse in log2 units; −0 where the row is steep; +inf for rows that see
///              nothing or do not exist, so that their weights come out as 0
///   delta      a float a row: Σ dO∘O − dlse; 0 where lse_log2 is +inf
///   steep_rows a SteepRow a row, which only steep rows use
///   dq         tile_m · head_dim floats a tile, where the gradients of all key blocks are summed, before the scale;
///              the kernel chooses their order within a tile. It is absent where a second pass forms dQ
///   state      an int for each part of a tile of dq, which says how far its sum is: see SumOfDq. It is absent where
///              blocks of keys add to zeros in any order
///   taken      an int, where thread blocks may ask for the next block and the batch is dense: see RaggedTiles::taken
///   steep      an int: the launch's mark, a number that no other launch has, if any row is steep. So nobody need clear
///              it. Where memory holds the mark by chance, or from the last run of a captured graph, the kernel takes
///              the slower path, with the same result
///   ragged     of a ragged batch, whose tiles have the slots of Spans, head by head: the lists of the blocks of
///              queries and of keys, see RaggedTiles
///   partial_dk, where a block of keys has several parts (see KeyBlock): for each part, in the order in which thread
///   partial_dv blocks take them, tile_n rows of D floats of dK, before the scale; and then as many of D_v floats of dV
struct BackwardWorkspace {
  /// The scores of a steep row are taken relative to these: FinishedRow's reference, and the log2 of its sum, both in
  /// the unit of scores (see ScoreMap).
  struct alignas(8) SteepRow {
    float reference;
    float rest;
  };

  std::int64_t tiles = 0;
  int m_blocks = 0;  // of one head of a dense batch; of a ragged one, slots of one head for all sequences
  int tile_m = 0;
  int head_dim = 0;  // 0: there is no dq
  int parts = 0;     // 0: there is no state
  bool ragged = false;
  int key_places = 0;             // slots for blocks of keys in one head of a ragged batch
  std::int64_t partial_rows = 0;  // of the parts of all blocks of keys; 0: each block has one, which stores dK and dV
  int columns_k = 0, columns_v = 0;  // D and D_v

  /// `parts` is the number of thread blocks that share a block of keys.
  static BackwardWorkspace of(const Problem& p, const Variant& v, int parts) {
    const std::int64_t places = p.places_q(v.tile_m);
    return {.tiles = p.heads_q * places,
            .m_blocks = p.ragged ? static_cast<int>(places) : Spans::tiles(p.seqlen_q, v.tile_m),
            .tile_m = v.tile_m,
            .head_dim = v.two_passes() ? 0 : v.head_dim,
            .parts = p.deterministic || v.arch == Arch::kSm90 ? v.parts_of_dq() : 0,
            .ragged = p.ragged,
            .key_places = p.ragged ? static_cast<int>(p.places_k(v.tile_n)) : 0,
            .partial_rows = parts > 1 ? p.heads_k * p.places_k(v.tile_n) * parts * v.tile_n : 0,
            .columns_k = p.head_dim,
            .columns_v = p.head_dim_v};
  }

  static constexpr float kSteepRow = -0.0f;  // stands in lse_log2 for a steep row
#ifdef __CUDACC__
  __device__ static bool says_steep(float lse_log2) { return __float_as_uint(lse_log2) == 0x80000000u; }
#endif

  std::int64_t bytes() const {
    return partial_rows > 0 ? partial_at() + 4 * partial_rows * (columns_k + columns_v) : bytes_before_partial();
  }
  FLASHTILE_HOST_DEVICE std::int64_t rows() const { return tiles * tile_m; }
  FLASHTILE_HOST_DEVICE float* lse_log2(void* base) const { return static_cast<float*>(base); }
  FLASHTILE_HOST_DEVICE float* delta(void* base) const { return lse_log2(base) + rows(); }
  FLASHTILE_HOST_DEVICE SteepRow* steep_rows(void* base) const {
    return reinterpret_cast<SteepRow*>(delta(base) + rows());
  }
  FLASHTILE_HOST_DEVICE float* dq(void* base) const { return delta(base) + 3 * rows(); }
  FLASHTILE_HOST_DEVICE int* state(void* base) const { return reinterpret_cast<int*>(dq(base) + rows() * head_dim); }
  FLASHTILE_HOST_DEVICE bool counts() const { return !ragged && (parts > 0 || head_dim == 0); }
  FLASHTILE_HOST_DEVICE int* taken(void* base) const { return state(base) + tiles * parts; }
  FLASHTILE_HOST_DEVICE unsigned* steep(void* base) const {
    return reinterpret_cast<unsigned*>(taken(base) + (counts() ? 1 : 0));
  }
  RaggedTiles ragged_queries(void* base) const { return list(base, queries_at(), m_blocks); }
  RaggedTiles ragged_keys(void* base) const { return list(base, keys_at(), key_places); }
  float* partial_dk(void* base) const {
    return partial_rows > 0 ? reinterpret_cast<float*>(static_cast<char*>(base) + partial_at()) : nullptr;
  }
  float* partial_dv(void* base) const {
    return partial_rows > 0 ? partial_dk(base) + partial_rows * columns_k : nullptr;
  }

 private:
  std::int64_t bytes_of_rows() const { return 4 * (rows() * (4 + head_dim) + tiles * parts + (counts() ? 1 : 0) + 1); }
  std::int64_t bytes_before_partial() const {
    return ragged ? keys_at() + RaggedTiles::bytes(key_places) : bytes_of_rows();
  }
  std::int64_t partial_at() const { return (bytes_before_partial() + 15) / 16 * 16; }
  std::int64_t queries_at() const { return (bytes_of_rows() + 15) / 16 * 16; }
  std::int64_t keys_at() const { return queries_at() + RaggedTiles::bytes(m_blocks); }
  RaggedTiles list(void* base, std::int64_t at, int places) const {
    return ragged ? RaggedTiles::at(static_cast<char*>(base) + at, places) : RaggedTiles{};
  }
};

}  // namespace flashtile
