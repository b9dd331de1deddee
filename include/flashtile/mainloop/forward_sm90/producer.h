// This file has the producer of Hopper's forward kernel, a thread (over pages a warp) that has TMA load tiles.
#pragma once

#include "flashtile/load/tma.h"
#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// Loads Q, K and V, in the order in which consumers make room: the K of each block, then the V of the block before it,
/// across tiles too, and Q after both: K0, Q, K1, V0, …, Kn, Vn-1, K0, Vn, Q, K1, V0, …
///
/// One thread loads them; over pages a warp does, of which each lane loads the boxes of one page.
template <class Mainloop>
struct ForwardProducerSm90 {
  using Params = typename Mainloop::Params;
  using SharedStorage = typename Mainloop::SharedStorage;
  using Element = typename Mainloop::Element;
  using Work = typename Mainloop::Work;
  static constexpr bool kPaged = Mainloop::kOverPages;
  static constexpr int kM = Mainloop::kM;
  static constexpr int kN = Mainloop::kN;
  static constexpr int kHeadDim = Mainloop::kHeadDim;
  static constexpr int kHeadDimV = Mainloop::kHeadDimV;
  static constexpr int kColumns = Mainloop::kColumns;
  static constexpr int kColumnsV = Mainloop::kColumnsV;
  static constexpr int kWarpgroups = Mainloop::kWarpgroups;

  Params const& params;
  SharedStorage& shared;
  typename Ring<Mainloop::kStagesQ>::Cursor q_at{};
  typename Ring<Mainloop::kStages>::Cursor at{};  // stage of the next block

  CUTE_DEVICE static bool leads() { return !kPaged || threadIdx.x % 32 == 0; }

  template <class Barriers, class Cursor, class Prepare>
  CUTE_DEVICE std::uint64_t* fill(Barriers& barriers, Cursor at, Prepare&& prepare) {
    if (leads()) barriers.fill(at, prepare);
    if (kPaged) __syncwarp();  // all lanes wait for lane 0, which has waited for the stage to be empty
    return reinterpret_cast<std::uint64_t*>(&barriers.full[at.stage]);
  }

  /// Returns, over pages, the rows of a lane's box of the block that begins with `key`. A box behind the last key has
  /// rows of the block's first one once more: no score of theirs counts.
  CUTE_DEVICE TmaRows rows_of_lane(Work const& work, int key) const {
    const int row = min(int(threadIdx.x % 32) * params.rows_of_box, kN - 1), used = work.sequence.k.used;
    const int first = key + row < used ? key + row : key;
    const int rows = min(params.rows_of_box, used - first);
    const Pages::Place place = params.pages.at(work.tile.batch, first);
    return TmaRows::ragged(place.page * params.pages.size.value + place.row, rows);
  }

  /// Loads the tile of K or V of the block that begins with `key`; over pages, each lane loads `rows`.
  template <int kColumnsOfTile, int kColumnsOfBox>
  CUTE_DEVICE void load_keys(CUtensorMap const& map, std::uint64_t* barrier, Element* tile, Work const& work, int key,
                             TmaRows const& rows) {
    if constexpr (kPaged) {
      const int row = threadIdx.x % 32 * params.rows_of_box;
      if (row < kN)
        load_tile<kN, kColumnsOfTile, kColumnsOfBox>(map, barrier, tile + row * kColumnsOfBox, rows, 0, work.kv_head);
    } else {
      load_tile<kN, kColumnsOfTile, kColumnsOfBox>(map, barrier, tile, work.k_rows, key, work.kv_head);
    }
  }

  /// Returns the first key of the block that is visited in a step.
  CUTE_DEVICE static int key_of(Work const& work, int step) { return work.keys.key(work.keys.visited(step)); }

  CUTE_DEVICE void load_q(Work const& work) {
    // The loop is not unrolled, as registers are scarce.
    CUTE_NO_UNROLL
    for (int w = 0; w < kWarpgroups; ++w) {
      constexpr int kRows = kM / kWarpgroups;
      std::uint64_t* barrier = fill(shared.q_barriers[w], q_at, [] { return kRows * kHeadDim * sizeof(Element); });
      if (leads())
        load_tile<kM, kHeadDim, kColumns>(params.q, barrier, shared.q[q_at.stage] + w * kRows * kColumns, work.q_rows,
                                          params.forward.scores.packing.query(work.tile.m_block * kM + w * kRows),
                                          params.forward.scores.packing.first_head(work.tile.head));
    }
    q_at.advance();
  }

  CUTE_DEVICE void run() {
    auto& works = shared.work_barriers;
    typename Ring<Mainloop::kWorks>::Cursor work_at{};
    // This is the block whose V is still to come, of the current tile or of the one before.
    int v_key = -1;
    // Over pages these are the rows of the next block, looked up a block ahead, and of the one whose V is to come.
    TmaRows rows, v_rows;
    const auto load_v = [&](bool of_tile_before) {
      if (v_key < 0) return;
      const auto v_at = at.previous();
      Work const& work = shared.work[of_tile_before ? work_at.previous().stage : work_at.stage];
      std::uint64_t* barrier = fill(shared.v_barriers, v_at, [] { return sizeof(SharedStorage::v[0]); });
      load_keys<kHeadDimV, kColumnsV>(params.v, barrier, shared.v[v_at.stage], work, v_key, v_rows);
    };
    CUTE_NO_UNROLL
    for (;; work_at.advance()) {
      works.wait_full(work_at);
      Work const& work = shared.work[work_at.stage];
      if (work.keys.blocks <= 0) {  // consumers finish what they have before they go on
        load_v(true);
        if (v_key >= 0 && leads()) works.release_by_thread(work_at.previous());
        v_key = -1;
        if (work.keys.blocks < 0) break;
        if (leads()) works.release_by_thread(work_at);
      }
      // The walk is read from shared memory each time, as registers are scarce: with a copy of it here ptxas allocates
      // them otherwise in the whole kernel, and consumers of D64 have 59 instructions between two matmuls, not 50.
      const auto walk = [&] { return work.keys.walk(); };
      if constexpr (kPaged) {
        if (!walk().empty()) rows = rows_of_lane(work, key_of(work, walk().first()));
      }
      CUTE_NO_UNROLL
      for (int n_block = walk().first(); n_block < walk().end(); n_block = walk().next(n_block)) {
        const int key = key_of(work, n_block);  // known before the wait for a stage: behind it, D96 lost 1 %
        std::uint64_t* barrier = fill(shared.k_barriers, at, [] { return sizeof(SharedStorage::k[0]); });
        load_keys<kHeadDim, kColumns>(params.k, barrier, shared.k[at.stage], work, key, rows);
        load_v(n_block == walk().first());
        if (n_block == walk().first()) {
          if (v_key >= 0 && leads()) works.release_by_thread(work_at.previous());
          load_q(work);
        }
        if (n_block == max(walk().end() - Mainloop::kBlocksAhead, walk().first()) && leads()) shared.near_end.arrive();
        v_key = key;
        if constexpr (kPaged) {
          v_rows = rows;
          if (n_block != walk().last()) rows = rows_of_lane(work, key_of(work, walk().next(n_block)));
        }
        at.advance();
      }
    }
  }
};

}  // namespace flashtile
