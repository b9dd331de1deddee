// This file has the producers of Hopper's forward kernel, which have TMA load tiles: a thread for Q, and one for K and
// V; or, where other warps transpose V, one thread for all.
#pragma once

#include "flashtile/load/tma.h"
#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// Loads tiles of K and V over pages: see pages_producer.h, which kernels over pages include.
template <class Mainloop>
struct PagesProducerSm90;

/// Loads the tile of Q of each piece of work. One thread does, apart from those that load keys, so that the first Q and
/// the first K are on their way at once.
template <class Mainloop>
struct QueryProducerSm90 {
  using Element = typename Mainloop::Element;
  static constexpr int kWarpgroups = Mainloop::kWarpgroups;
  static constexpr int kRows = Mainloop::kM / kWarpgroups;

  typename Mainloop::Params const& params;
  typename Mainloop::SharedStorage& shared;
  typename Ring<Mainloop::kStagesQ>::Cursor at{};

  CUTE_DEVICE void run() {
    typename Ring<Mainloop::kWorks>::Cursor work_at{};
    CUTE_NO_UNROLL
    for (;; work_at.advance()) {
      shared.work_barriers.wait_full(work_at);
      typename Mainloop::Work const& work = shared.work[work_at.stage];
      if (work.keys.blocks < 0) break;
      if (work.keys.blocks > 0) load(work);
      shared.work_barriers.release_by_thread(work_at);
    }
  }

  /// Loads the next tile of Q.
  CUTE_DEVICE void load(typename Mainloop::Work const& work) {
    // The loop is not unrolled, as registers are scarce.
    CUTE_NO_UNROLL
    for (int w = 0; w < kWarpgroups; ++w) {
      HeadPacking const& packing = params.forward.scores.packing;
      std::uint64_t* barrier = shared.q_barriers[w].fill(
          at, [&] { return packing.used_rows(kRows) * Mainloop::kHeadDim * sizeof(Element); });
      CUTE_NO_UNROLL
      for (int row = w * kRows; row < (w + 1) * kRows; row += packing.rows_of_box(kRows)) {
        load_tile<Mainloop::kM, Mainloop::kHeadDim, Mainloop::kColumns>(
            params.q, barrier, shared.q[at.stage] + row * Mainloop::kColumns, work.q_rows,
            packing.queries_of(work.tile.m_block * Mainloop::kM + row), work.tile.head);
      }
    }
    at.advance();
  }
};

/// Loads K and V, in the order in which consumers make room: the K of each block, then the V of the block before it,
/// across tiles too: K0, K1, V0, …, Kn, Vn-1, K0, Vn, K1, V0, …
template <class Mainloop>
struct ForwardProducerSm90 {
  using Params = typename Mainloop::Params;
  using SharedStorage = typename Mainloop::SharedStorage;
  using Work = typename Mainloop::Work;

  Params const& params;
  SharedStorage& shared;
  typename Ring<Mainloop::kStages>::Cursor at{};  // stage of the next block
  RingCursor<Mainloop::kStagesOfRows> rows_at{};  // and that of the next rows of V, where they are transposed
  typename Ring<Mainloop::kColumnStages>::Cursor columns_at{};
  QueryProducerSm90<Mainloop> queries{params, shared};

  /// Loads the columns of the block from `key` on, as its consumers have to ask them. It comes after V: consumers may
  /// need that before they are done with the columns of the block before.
  CUTE_DEVICE void load_columns(Work const& work, int key) {
    const int bytes = min(Mainloop::kN, work.sequence.k.used - key) * int(sizeof(HiddenRows));
    std::uint64_t* barrier = shared.columns_barriers.fill(columns_at, [&] { return bytes; });
    cute::SM90_BULK_COPY_G2S::copy(work.more.columns + key, barrier, shared.columns[columns_at.stage], bytes);
    columns_at.advance();
  }

  /// Returns the descales of the block from `key` on.
  CUTE_DEVICE auto descales(Work const& work, int key) const {
    typename Mainloop::BlockDescales of_block;
    CUTE_UNROLL
    for (int i = 0; i < Mainloop::kDescales; ++i) {
      const int row = min(key + i * Mainloop::kRowsOfDescale, work.sequence.k.used - 1);
      of_block.k[i] = usable_descale(params.k_descales.at(work.more.k_descales, row));
      of_block.v_log2[i] = __log2f(usable_descale(params.v_descales.at(work.more.v_descales, row)));
    }
    return of_block;
  }

  CUTE_DEVICE void run() {
    auto& works = shared.work_barriers;
    typename Ring<Mainloop::kWorks>::Cursor work_at{};
    // This is the block whose V is still to come, of the current tile or of the one before.
    int v_key = -1;
    const auto load_v = [&](bool of_tile_before) {
      if (v_key < 0) return;
      Work const& work = shared.work[of_tile_before ? work_at.previous().stage : work_at.stage];
      const auto load = [&](auto& barriers, auto& tiles, auto v_at) {
        std::uint64_t* barrier = barriers.fill(v_at, [] { return sizeof(SharedStorage::v[0]); });
        load_tile<Mainloop::kN, Mainloop::kHeadDimV, Mainloop::kColumnsV>(params.v, barrier, tiles[v_at.stage],
                                                                          work.k_rows, v_key, work.kv_head);
      };
      if constexpr (Mainloop::kScaled) {
        load(shared.few.barriers, shared.rows_of_v, rows_at);
        rows_at.advance();
      } else {
        load(shared.v_barriers, shared.v, at.previous());
      }
    };
    CUTE_NO_UNROLL
    for (;; work_at.advance()) {
      works.wait_full(work_at);
      Work const& work = shared.work[work_at.stage];
      if (work.keys.blocks <= 0) {  // consumers finish what they have before they go on
        load_v(true);
        if (v_key >= 0) works.release_by_thread(work_at.previous());
        v_key = -1;
        if (work.keys.blocks < 0) break;
        works.release_by_thread(work_at);
        continue;
      }
      // The walk is read from shared memory each time, as registers are scarce: with a copy of it here ptxas allocates
      // them otherwise in the whole kernel, and consumers of D64 have 59 instructions between two matmuls, not 50.
      const auto walk = [&] { return work.keys.walk(); };
      MaskedBlocks blocks;
      if constexpr (Mainloop::kMasked) blocks.words = work.more.words;
      CUTE_NO_UNROLL
      for (int n_block = walk().first(); n_block < walk().end(); n_block = walk().next(n_block)) {
        // The key is known before the wait for a stage: behind it, D96 lost 1 %.
        int key;
        if constexpr (Mainloop::kMasked)
          key = blocks.next(params.forward.mask_tables.queries.words) * Mainloop::kN;
        else
          key = Mainloop::key_of_step(work, n_block);
        struct Nothing {};
        std::conditional_t<Mainloop::kScaled, typename Mainloop::BlockDescales, Nothing> scales;
        if constexpr (Mainloop::kScaled) scales = descales(work, key);
        std::uint64_t* barrier = shared.k_barriers.fill(at, [&] {
          if constexpr (Mainloop::kMasked) shared.first_key[at.stage] = key;
          if constexpr (Mainloop::kScaled) shared.few.descales[at.stage] = scales;
          return sizeof(SharedStorage::k[0]);
        });
        load_tile<Mainloop::kN, Mainloop::kHeadDim, Mainloop::kColumns>(params.k, barrier, shared.k[at.stage],
                                                                        work.k_rows, key, work.kv_head);
        load_v(n_block == walk().first());
        if constexpr (Mainloop::kScaled) {  // consumers may still need that V before they give a stage of Q back
          if (n_block == walk().first()) queries.load(work);
        }
        if constexpr (Mainloop::kMasked) {
          if (walk().is_edge(n_block)) load_columns(work, key);
        }
        if (n_block == walk().first() && v_key >= 0) works.release_by_thread(work_at.previous());
        if (n_block == max(walk().end() - Mainloop::kBlocksAhead, walk().first())) shared.near_end.arrive();
        v_key = key;
        at.advance();
      }
    }
  }
};

}  // namespace flashtile
