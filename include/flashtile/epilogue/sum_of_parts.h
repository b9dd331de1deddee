// This epilogue adds up what a tile's rows have of one part of their keys after the other: see FixedParts.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/fixed_parts.h"
#include "flashtile/math/part.h"

namespace flashtile {

/// SumOfParts is one consumer thread's sum of the parts before the current one. Registers are taken, so the outputs lie
/// in shared memory, where the finished tile is staged later, or else in memory, which the L2 cache holds. Each thread
/// has places of its own. Parts are joined as join_fixed_parts() does, to the bit.
template <class Mainloop>
class SumOfParts {
  static constexpr int kSums = Mainloop::kHeadDimV / 2;  // of a thread, two of one of its rows, then two of the other
  static constexpr int kTogether = 32;                   // so many are on their way at a time
  static_assert(kSums % 8 == 0);

 public:
  CUTE_DEVICE SumOfParts(FixedParts const& parts, void* staging) : parts(parts), staging(staging) {}

  /// Adds the result over a part that has ended, which may be the tile's first. `sums` are the accumulators, before
  /// they are normalised, and the row sums of `softmax` are complete.
  template <class Sums, class Softmax>
  CUTE_DEVICE void add(bool first, Sums& sums, Softmax& softmax) {
    float4* const own = place();
    if (!first) {
      join(own, sums, softmax);
    } else if (Mainloop::kSumsInSharedMemory) {
      if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();  // the output of the tile before has left
      __syncwarp();
    }
    CUTE_UNROLL
    for (int i = 0; i < kSums; i += 4) own[i / 4 * 32] = make_float4(sums(i), sums(i + 1), sums(i + 2), sums(i + 3));
    keep(softmax.row);
  }

  /// Adds the sum to the result over the tile's last part.
  template <class Sums, class Softmax>
  CUTE_DEVICE void finish(Sums& sums, Softmax& softmax) {
    softmax.finish_sums();
    join(place(), sums, softmax);
    if (threadIdx.x % 4 != 0) softmax.row[0].sum = softmax.row[1].sum = 0;  // finish_sums() will be called once more
  }

 private:
  CUTE_DEVICE float4* place() const {
    int lane;  // read anew, lest an address takes a register from the mainloop
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    if constexpr (Mainloop::kSumsInSharedMemory) return static_cast<float4*>(staging) + lane;
    const int warp = blockIdx.x * (4 * Mainloop::kWarpgroups) + threadIdx.x / 32 - 4;
    return reinterpret_cast<float4*>(parts.sums) + std::int64_t(warp) * (kSums / 4 * 32) + lane;
  }

  /// The four threads of a quad have the same two rows: each keeps a fourth of what these need, and join() asks all.
  template <class RowStates>
  CUTE_DEVICE void keep(RowStates const& rows) {
    const bool second = threadIdx.x & 2, of_sum = threadIdx.x & 1;
    const float reference = second ? rows[1].reference : rows[0].reference;
    const float sum = second ? rows[1].sum : rows[0].sum;
    kept = of_sum ? sum : reference;
  }
  CUTE_DEVICE RowState kept_row(int r) const {
    const auto of_lane = [&](int lane) { return __shfl_sync(0xffffffff, kept, lane, 4); };
    return {of_lane(2 * r), of_lane(2 * r + 1)};
  }

  /// Makes `sums` and the rows of `softmax` those of all parts so far.
  template <class Sums, class Softmax>
  CUTE_DEVICE void join(const float4* own, Sums& sums, Softmax& softmax) const {
    const RowState before[] = {kept_row(0), kept_row(1)};
    RowState joined[2];
    CUTE_UNROLL
    for (int first = 0; first < kSums; first += kTogether) {
      float4 of_parts[kTogether / 4];
      CUTE_UNROLL
      for (int i = 0; i < kTogether / 4; ++i)
        if (first + 4 * i < kSums) of_parts[i] = own[(first / 4 + i) * 32];
      CUTE_UNROLL
      for (int i = 0; i < kTogether; i += 8) {
        if (first + i >= kSums) continue;
        const float4 left = of_parts[i / 4], right = of_parts[i / 4 + 1];
        Part of_row[] = {{{left.x, left.y, right.x, right.y}, before[0]},
                         {{left.z, left.w, right.z, right.w}, before[1]}};
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int at = first + i + 2 * r;
          of_row[r].join({{sums(at), sums(at + 1), sums(at + 4), sums(at + 5)}, softmax.row[r]}, softmax.unit_log2);
          sums(at) = of_row[r].o.x, sums(at + 1) = of_row[r].o.y;
          sums(at + 4) = of_row[r].o.z, sums(at + 5) = of_row[r].o.w;
          joined[r] = of_row[r].state;
        }
      }
    }
    softmax.row[0] = joined[0], softmax.row[1] = joined[1];
  }

  FixedParts const& parts;
  void* const staging;  // of the warp
  float kept;
};

}  // namespace flashtile
