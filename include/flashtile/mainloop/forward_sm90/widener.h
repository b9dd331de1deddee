// This file has the widener of Hopper's forward kernel, for caches of 8-bit numbers that queries of 16 bits meet:
// matmuls take both operands in one dtype.
#pragma once

#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/mainloop/keys_of_8_bits.h"
#include "flashtile/math/round.h"

namespace flashtile {

/// Widens each tile of K, and of V, as it comes: to the dtype of queries and to float16, exactly, unless it has to
/// multiply numbers with their descale before (see ByFactors). It is one of a warpgroup's threads. Neighbouring threads
/// have neighbouring rows, which are swizzled, so that they meet different banks of shared memory.
template <class Mainloop>
struct KeyWidenerSm90 {
  using Stored = typename Mainloop::Stored;
  using Work = typename Mainloop::Work;
  static constexpr int kN = Mainloop::kN;
  static constexpr int kThreads = 32 * Mainloop::kWideners;
  static constexpr int kSharers = kThreads / kN;  // of a row: each has some of its columns
  static_assert(kThreads % kN == 0);

  typename Mainloop::Params const& params;
  typename Mainloop::SharedStorage& shared;
  const int thread;

  CUTE_DEVICE void run() {
    typename Ring<Mainloop::kWorks>::Cursor work_at{};
    Side<Mainloop::kStages> k;
    Side<Mainloop::kStagesV> v;
    CUTE_NO_UNROLL
    for (;; work_at.advance()) {
      shared.work_barriers.wait_full(work_at);
      Work const& work = shared.work[work_at.stage];
      if (work.keys.blocks < 0) break;
      const auto walk = [&] { return work.keys.walk(); };
      const float of_k = work.more.of_k, of_v = work.more.of_v;
      CUTE_NO_UNROLL
      for (int n_block = walk().first(); n_block < walk().end(); n_block = walk().next(n_block)) {
        widen_tile<Mainloop::kHeadDim>(k, shared.few.k_barriers, shared.rows_of_k, shared.k_barriers, shared.k, of_k);
        widen_tile<Mainloop::kHeadDimV>(v, shared.few.v_barriers, shared.rows_of_v, shared.v_barriers, shared.v, of_v);
      }
      __syncwarp();
      if (leads()) shared.work_barriers.release_by_thread(work_at);
    }
  }

 private:
  /// These are the stages that come next, of a tile as it is stored and of a wide one.
  template <int kStages>
  struct Side {
    RingCursor<Mainloop::kStagesOfRows> narrow{};
    RingCursor<kStages> wide{};
  };

  CUTE_DEVICE static bool leads() { return threadIdx.x % 32 == 0; }

  template <int kWidth, class Cursors, class Loaded, class Rows, class Barriers, class Tiles>
  CUTE_DEVICE void widen_tile(Cursors& at, Loaded& loaded, Rows& rows, Barriers& barriers, Tiles& tiles,
                              float factor) const {
    loaded.wait_full(at.narrow);
    barriers.empty[at.wide.stage].wait(at.wide.parity ^ 1);
    if (factor == 1) [[likely]]
      widen_row<kWidth, false>(rows[at.narrow.stage], tiles[at.wide.stage], factor);
    else
      widen_row<kWidth, true>(rows[at.narrow.stage], tiles[at.wide.stage], factor);
    cutlass::arch::fence_view_async_shared();  // matmuls read it by another way
    loaded.release_by_warp(at.narrow);
    at.narrow.advance();
    if (leads()) barriers.full[at.wide.stage].arrive();
    at.wide.advance();
  }

  /// Widens the thread's share of its row, 16 numbers at a time, which become twice 16 bytes.
  template <int kWidth, bool kMultiplies, class Wide>
  CUTE_DEVICE void widen_row(Stored const* from, Wide* to, float factor) const {
    constexpr int kBytes = columns_per_box(kWidth, sizeof(Stored));  // of a row of a box as it is stored
    constexpr int kColumns = columns_per_box(kWidth, sizeof(Wide)), kWideBytes = kColumns * sizeof(Wide);
    constexpr int kShare = kWidth / kSharers, kOfChunk = 16, kAtOnce = 4;
    static_assert(kShare % kColumns == 0 && kShare % (kAtOnce * kOfChunk) == 0);
    const int row = thread % kN, first = thread / kN * kShare;
    const auto* const narrow_row = reinterpret_cast<const unsigned char*>(from);
    auto* const wide_row = reinterpret_cast<unsigned char*>(to) + first / kColumns * kWideBytes * kN;
    CUTE_NO_UNROLL
    for (int begin = 0; begin < kShare; begin += kAtOnce * kOfChunk) {
      uint4 narrow[kAtOnce];  // all are asked for before the first is waited for
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int byte = first + begin + kOfChunk * i;
        narrow[i] = *reinterpret_cast<const uint4*>(narrow_row + byte / kBytes * kBytes * kN +
                                                    Mainloop::template place_in_box<kBytes>(row, byte % kBytes));
      }
      CUTE_UNROLL
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const std::uint32_t words[] = {narrow[i / 2].x, narrow[i / 2].y, narrow[i / 2].z, narrow[i / 2].w};
        const TwoPairs a = widen<Stored>(words[i % 2 * 2]), b = widen<Stored>(words[i % 2 * 2 + 1]);
        const auto as_wide = [&](std::uint32_t halves) {
          if constexpr (!kMultiplies && std::is_same_v<Wide, cutlass::half_t>) return halves;
          const float2 pair = unround<cutlass::half_t>(halves);
          return kMultiplies ? round_pair<Wide>(pair.x * factor, pair.y * factor) : round_pair<Wide>(pair.x, pair.y);
        };
        const int column = begin + kOfChunk / 2 * i;
        *reinterpret_cast<uint4*>(
            wide_row + column / kColumns * kWideBytes * kN +
            Mainloop::template place_in_box<kWideBytes>(row, column % kColumns * int(sizeof(Wide)))) = {
            as_wide(a.first), as_wide(a.second), as_wide(b.first), as_wide(b.second)};
      }
    }
  }
};

}  // namespace flashtile
