// Results over some of a tile's keys, in the workspace: where they lie, and who comes last and joins them.
#pragma once

#include <cuda/atomic>
#include <cute/tensor.hpp>

#include "flashtile/kernel/kvcache_sm80/shares.h"
#include "flashtile/kvcache_params.h"
#include "flashtile/math/part.h"

namespace flashtile {

/// Where the parts of a tile lie, in the order of their keys. Teams leave at most two: what they begin with, and what
/// they end with.
struct PlacesOfParts {
  int count;
  int own;    // which part this team's is
  int first;  // place
  int next, step;

  CUTE_DEVICE int operator[](int n) const { return n == 0 ? first : next + (n - 1) * step; }

  CUTE_DEVICE static PlacesOfParts of(KvcacheSegment const& s, bool splits, int team, TeamShares const& shares) {
    if (splits) return {s.tile.items, s.items.begin, s.first_item, s.first_item + 1, 1};
    const int first = shares.team_of(s.first_item), last = shares.team_of(s.first_item + s.tile.items - 1);
    const int before = shares.first_item(first) == s.first_item ? 0 : 1;  // whether that team had another before
    return {last - first + 1, team - first, 2 * first + before, 2 * (first + 1), 2};
  }
};

/// The parts of one KV head.
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

  /// Where the parts of a tile are counted.
  CUTE_DEVICE MarkedCount arrivals(PlacesOfParts const& places) const {
    return {params.partials.arrivals + index_of(places.first), params.partials.mark};
  }

  /// Says that a part is written. Whether all are, which one thread block of a tile's is told, the last. Counting
  /// begins with 0, whatever was `found` there: whoever comes sees to it before it counts.
  CUTE_DEVICE bool hand_in(PlacesOfParts const& places, std::uint64_t found) const {
    bool last = false;
    __syncthreads();
    if (threadIdx.x == 0) {
      const MarkedCount arrived = arrivals(places);
      arrived.begin(found);
      last = arrived.add(cuda::memory_order_acq_rel) == places.count - 1;  // one fence, a light one
      if (last) arrived.clear();
    }
    return __syncthreads_or(last);
  }

  /// Joins every second part from the `first` on. Several are on their way together.
  CUTE_DEVICE Part join_every_second(PlacesOfParts const& places, int first, int count, int row, int column,
                                     float unit_log2) const {
    constexpr int kAhead = 8;
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
  CUTE_DEVICE std::int64_t index_of(int place) const { return std::int64_t(place) * params.heads_k.value + head; }
};

}  // namespace flashtile
