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
template <Variant kV>
struct KvcacheSource {
  static constexpr bool kMayMap = true;
  using Params = KvcacheParams;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kGroups = groups_of(kV);
  using Mainloop = ForwardMainloopSm80<of_group(kV), KvcacheSource>;
  using Element = ElementOf<kV.dtype>;

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
    gather<typename Mainloop::Load>(CachePolicy(false), row_at, sQ,
                                    queries.used * params.scores.packing.heads.value - first, params.head_dim, thread);
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
  CUTE_DEVICE KvcacheScores<kN, kGroups> scores(Lengths lengths) const {
    return {{params.scores, tile, tile.m_block * kM, lengths}, params.schedule.masked, group};
  }

 private:
  static constexpr bool kLanePerRow = Mainloop::kThreads == 32 && kN <= 32;

  CUTE_DEVICE int first_of(int block) const { return first_row + (block * kGroups + group) * kN; }
  /// Returns where the lane's row of a block lies: in a row that exists, whatever block it is.
  CUTE_DEVICE Pages::Place find(int block) const {
    return kLanePerRow ? params.pages.at(tile.batch, min(first_of(block) + thread, end_row - 1)) : Pages::Place{};
  }

  template <class Shared>
  CUTE_DEVICE void load(const void* base, Strides const& strides, int block, Shared const& shared, int columns) const {
    const Element* const origin = static_cast<const Element*>(base) + tile.head * strides.head;
    const int first = first_of(block);
    const auto load = [&](auto&& row_at) {
      gather<typename Mainloop::Load>(policy, row_at, shared, end_row - first, columns, thread);
    };
    if constexpr (kLanePerRow) {
      const Element* const own = origin + strides.at(place.page, place.row);
      load([&](int row) { return of_lane(own, row); });
    } else {
      load([&](int row) {
        const Pages::Place place = params.pages.at(tile.batch, min(first + row, end_row - 1));
        return origin + strides.at(place.page, place.row);
      });
    }
  }
};

}  // namespace flashtile
