// This file keeps the parts of tiles, partial results over some of a tile's keys, in the workspace: it says where they
// lie, and which thread block comes last and joins them.
#pragma once

#include <cuda/atomic>
#include <cute/tensor.hpp>

#include "flashtile/kernel/kvcache_sm80/shares.h"
#include "flashtile/kvcache_params.h"
#include "flashtile/math/part.h"

namespace flashtile {

/// PlacesOfParts says in which places (slots of the workspace) the parts of a tile lie, in the order of their keys. A
/// team of thread blocks leaves two parts at most: of the tile that it begins with, and of the one that it ends with.
struct PlacesOfParts {
  int count;
  int own;         // which part is this team's
  int first;       // place of the first part
  int next, step;  // place of the second one, and how far the others are apart

  CUTE_DEVICE int operator[](int n) const { return n == 0 ? first : next + (n - 1) * step; }

  CUTE_DEVICE static PlacesOfParts of(KvcacheSegment const& s, bool splits, int team, TeamShares const& shares) {
    if (splits) return {s.tile.items, s.items.begin, s.first_item, s.first_item + 1, 1};
    const int first = shares.team_of(s.first_item), last = shares.team_of(s.first_item + s.tile.items - 1);
    const int before = shares.first_item(first) == s.first_item ? 0 : 1;  // whether that team began before this tile
    return {last - first + 1, team - first, 2 * first + before, 2 * (first + 1), 2};
  }
};

/// PartsInMemory writes and reads the parts of one KV head.
template <int kM, int kHeadDim>
struct PartsInMemory {
  KvcacheParams const& params;
  int head;

  CUTE_DEVICE void store(int place, int row, int column, Part const& part) const {
    const std::int64_t index = index_of(place) * kM + row;
    *reinterpret_cast<float4*>(params.partials.out + index * kHeadDim + column) = part.o;
    if (column == 0) params.partials.state[index] = part.state;
  }

  CUTE_DEVICE Part load(int place, int row, int column) const {
    const std::int64_t index = index_of(place) * kM + row;
    const float2 state = __ldcg(reinterpret_cast<const float2*>(params.partials.state + index));
    return {__ldcg(reinterpret_cast<const float4*>(params.partials.out + index * kHeadDim + column)),
            {state.x, state.y}};
  }

  /// Makes the count of a tile's written parts begin with 0, whatever memory held. One thread of each thread block, the
  /// `counter`, calls it while others write the part: it takes a load and an atomic, one after the other.
  CUTE_DEVICE void begin_count(PlacesOfParts const& places) const {
    const MarkedCount arrived = arrivals(places);
    arrived.begin(arrived.found());
  }

  /// Counts this thread block's part as written, and returns whether it is the tile's last, as just one thread block is
  /// told. The thread `counter` has called begin_count().
  CUTE_DEVICE bool hand_in(PlacesOfParts const& places, int counter) const {
    bool last = false;
    __syncthreads();  // all threads have written their chunks of the part
    if (threadIdx.x == counter) {
      const MarkedCount arrived = arrivals(places);
      last = arrived.add(cuda::memory_order_acq_rel) == places.count - 1;  // acq_rel is one fence, a light one
      if (last) arrived.clear();
    }
    return __syncthreads_or(last);
  }

  /// Joins every second part from the `first` on. Loads of several parts are in flight together.
  CUTE_DEVICE Part join_every_second(PlacesOfParts const& places, int first, int count, int row, int column,
                                     float unit_log2) const {
    constexpr int kAhead = 12;
    Part sum;
    CUTE_NO_UNROLL
    for (int n = first; n < count; n += 2 * kAhead) {
      Part some[kAhead];
      CUTE_UNROLL
      for (int i = 0; i < kAhead; ++i)
        if (n + 2 * i < count) some[i] = load(places[n + 2 * i], row, column);
      CUTE_UNROLL
      for (int i = 0; i < kAhead; ++i) sum.join(some[i], unit_log2);
    }
    return sum;
  }

 private:
  CUTE_DEVICE MarkedCount arrivals(PlacesOfParts const& places) const {
    return {params.partials.arrivals + index_of(places.first), params.partials.mark};
  }
  CUTE_DEVICE std::int64_t index_of(int place) const { return std::int64_t(place) * params.heads_k.value + head; }
};

}  // namespace flashtile
