// This file says where Ampere's mainloop finds its rows over a cache.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/warp.h"
#include "flashtile/kernel/kvcache_sm80/scores.h"
#include "flashtile/kvcache_params.h"
#include "flashtile/load/gather.h"
#include "flashtile/mainloop/forward_sm80.h"
#include "flashtile/math/element.h"

namespace flashtile {

/// Returns the variant of the mainloop of one group of warps.
constexpr Variant of_group(Variant v) {
  v.warps = warps_of_group(v);
  return v;
}

/// KvcacheSource is the mainloop's Source for the rows of a tile of one sequence, and of keys in the pages of a cache.
template <Variant kV, bool kPlain>
struct KvcacheSource {
  static constexpr bool kMayMap = !kPlain;
  using Params = KvcacheParams;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kGroups = groups_of(kV);
  using Mainloop = ForwardMainloopSm80<of_group(kV), KvcacheSource>;
  using Element = ElementOf16Bits<kV.dtype>;
  using Stored = ElementOf<kV.dtype>;

  KvcacheParams const& params;
  TileCoord tile;
  Span queries;
  int first_row;  // row of the cache that is key 0 of the segment
  int end_row;
  int group;
  int thread;
  CachePolicy policy;
  // With kLanePerRow this is where the lane's row of the next block lies, looked up a block ahead.
  Pages::Place place = find(0);

  template <class Shared>
  CUTE_DEVICE void load_q(Shared const& sQ, int thread) const {
    const int first = tile.m_block * kM;
    const Element* const origin = static_cast<const Element*>(params.q) +
                                  params.q_strides.at(tile.batch, queries.first) +
                                  tile.head * params.scores.packing.heads.value * params.q_strides.head;
    const auto row_at = [&](int row) {
      return origin + params.scores.packing.query(first + row) * params.q_strides.row +
             params.scores.packing.head(first + row) * params.q_strides.head;
    };
    const int rows = queries.used * params.scores.packing.heads.value - first;
    const auto load = [&](auto&& row_at) {
      gather<typename Mainloop::Load>(CachePolicy(false), row_at, sQ, rows, params.head_dim, thread);
    };
    if constexpr (kLanePerRow) {  // an address takes some 25 instructions, and a lane copies pieces of several rows
      const Element* const own = row_at(thread % kM);
      load([&](int row) { return of_lane(own, row); });
    } else {
      load(row_at);
    }
  }
  template <class Shared>
  CUTE_DEVICE void load_k(int block, Shared const& sK, int) const {
    load(params.k, params.k_strides, block, sK, params.head_dim);
  }
  template <class Shared>
  CUTE_DEVICE void load_v(int block, Shared const& sV, int) {
    load(params.v, params.v_strides, block, sV, params.head_dim_v);
    place = find(block + 1);
  }
  CUTE_DEVICE int visited(int step) const { return step; }

  // These are for numbers of 8 bits.
  template <class Shared>
  CUTE_DEVICE void prepare_queries(Shared const& sQ, int first_row, float* factors) const {
    const int rows = min(queries.used * params.scores.packing.heads.value - tile.m_block * kM - first_row, min(kM, 16));
    if (params.is_bf16)
      flashtile::prepare_queries<cutlass::bfloat16_t>(sQ, first_row, rows, factors);
    else
      flashtile::prepare_queries<cutlass::half_t>(sQ, first_row, rows, factors);
  }
  CUTE_DEVICE bool has_descales_of_rows() const { return params.k_descales.of_rows; }
  CUTE_DEVICE float descale_k() const { return of_all(params.k_descales); }
  CUTE_DEVICE float descale_v() const { return of_all(params.v_descales); }
  /// Copies the descales of a block's rows, of keys or of values. The lane's row is that of load_k() and load_v().
  template <bool kOfValues>
  CUTE_DEVICE void load_descales(int block, float* to) const {
    CacheDescales const& descales = kOfValues ? params.v_descales : params.k_descales;
    CUTE_UNROLL
    for (int row = thread; row < kN; row += Mainloop::kThreads) {
      const Pages::Place here =
          kLanePerRow ? place : params.pages.at(tile.batch, min(first_of(block) + row, end_row - 1));
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(to + row)),
                   "l"(descales.at(tile.batch, tile.head, here)));
    }
  }
  CUTE_DEVICE KvcacheScores<kN, kGroups, kM == 8 ? 1 : 2, kPlain> scores(Lengths lengths) const {
    return {{params.scores, tile, tile.m_block * kM, lengths}, params.schedule.masked, group};
  }

 private:
  static constexpr bool kLanePerRow = Mainloop::kThreads == 32 && kN <= 32;

  CUTE_DEVICE float of_all(CacheDescales const& descales) const {
    return descales.of_rows ? 1.0f : descales.of(tile.batch, tile.head, {});
  }
  CUTE_DEVICE int first_of(int block) const { return first_row + (block * kGroups + group) * kN; }
  /// Returns where the lane's row of a block lies: in a row that exists, whatever block it is.
  CUTE_DEVICE Pages::Place find(int block) const {
    return kLanePerRow ? params.pages.at(tile.batch, min(first_of(block) + thread, end_row - 1)) : Pages::Place{};
  }

  template <class Shared>
  CUTE_DEVICE void load(const void* base, Strides const& strides, int block, Shared const& shared, int columns) const {
    // Rows are copied as units of 16 bits: elements, or pairs of 8-bit numbers.
    const Stored* const origin = static_cast<const Stored*>(base) + tile.head * strides.head;
    const auto row_of = [&](Pages::Place place) {
      return reinterpret_cast<const Element*>(origin + strides.at(place.page, place.row));
    };
    const int first = first_of(block), units = Mainloop::kFp8 ? columns / 2 : columns;
    const auto load = [&](auto&& row_at) {
      gather<typename Mainloop::LoadKV>(policy, row_at, shared, end_row - first, units, thread);
    };
    if constexpr (kLanePerRow) {
      const Element* const own = row_of(place);
      load([&](int row) { return of_lane(own, row); });
    } else {
      load([&](int row) { return row_of(params.pages.at(tile.batch, min(first + row, end_row - 1))); });
    }
  }
};

}  // namespace flashtile
