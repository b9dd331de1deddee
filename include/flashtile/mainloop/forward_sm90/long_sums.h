// This file keeps sums of many products of 8 bits exact, in Hopper's forward kernel.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// Hopper's tensor cores keep some 13 bits of a sum of 8-bit products and drop the others, so that with each 32 keys
/// the sum loses up to 2^-10 of itself: most of it over 128k keys whose values have one sign. So P·V of every kKeys
/// keys is added to a second sum, and begins anew. Registers are taken, so that this sum is where the output is staged
/// later, in float16: rounded to nearest, it is as exact as a few dozen summands need. Each thread has places of its
/// own.
template <class Mainloop>
class LongSums {
  static constexpr int kKeys = 1024, kBlocks = kKeys / Mainloop::kN;
  /// A sum of 2^17 weights of up to 14, times numbers up to 448, fits into float16 by this factor.
  static constexpr float kFactor = 0x1p-17f;

 public:
  CUTE_DEVICE void begin() { blocks = 0; }

  /// Counts a block that was summed, and returns whether the sum has now been taken, so that it begins anew. `staging`
  /// is that of the warp.
  template <class Sums>
  CUTE_DEVICE bool take(void* staging, Sums& sums) {
    if (++blocks % kBlocks != 0) [[likely]]
      return false;
    const bool first = blocks == kBlocks;
    if (first) {
      if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();  // the output of the tile before has left
      __syncwarp();
    }
    each(staging, [&](int i, uint4& taken) {
      auto* const pairs = reinterpret_cast<__half2*>(&taken);
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        const __half2 more = __floats2half2_rn(sums(i + 2 * n) * kFactor, sums(i + 2 * n + 1) * kFactor);
        pairs[n] = first ? more : __hadd2(pairs[n], more);
      }
    });
    return true;
  }

  /// Multiplies the rows of what was taken.
  CUTE_DEVICE void scale(void* staging, float const (&factor)[2]) const {
    if (blocks < kBlocks) return;
    each(staging, [&](int, uint4& taken) {
      auto* const pairs = reinterpret_cast<__half2*>(&taken);
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {  // two of each of the thread's rows in turn
        const float2 x = __half22float2(pairs[n]);
        pairs[n] = __floats2half2_rn(x.x * factor[n % 2], x.y * factor[n % 2]);
      }
    });
  }

  /// Adds what was taken.
  template <class Sums>
  CUTE_DEVICE void add_to(void* staging, Sums& sums) const {
    if (blocks < kBlocks) return;
    each(staging, [&](int i, uint4& taken) {
      auto const* const pairs = reinterpret_cast<__half2 const*>(&taken);
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        const float2 x = __half22float2(pairs[n]);
        sums(i + 2 * n) = fmaf(x.x, 1 / kFactor, sums(i + 2 * n));
        sums(i + 2 * n + 1) = fmaf(x.y, 1 / kFactor, sums(i + 2 * n + 1));
      }
    });
  }

 private:
  /// Calls `visit(i, taken)` for each eight accumulators from i on, and what was taken of them.
  template <class Visit>
  CUTE_DEVICE static void each(void* staging, Visit&& visit) {
    constexpr int kSums = Mainloop::kHeadDimV / 2;  // of a thread: 16 rows of a warp
    static_assert(Mainloop::kMemory.staged && kSums % 8 == 0);
    int lane;  // read anew, lest an address takes a register from the mainloop
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    uint4* const own = static_cast<uint4*>(staging) + lane;
    CUTE_UNROLL
    for (int i = 0; i < kSums; i += 8) {
      uint4 taken = own[i / 8 * 32];
      visit(i, taken);
      own[i / 8 * 32] = taken;
    }
  }

  int blocks = 0;  // of the tile that were summed
};

/// Kernels for 16 bits have this instead, whose sums are float32 anyway.
struct NoLongSums {};

}  // namespace flashtile
