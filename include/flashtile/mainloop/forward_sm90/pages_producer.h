// This file has the producers of Hopper's forward kernel over the pages of a cache: a warp for K, and one for V.
#pragma once

#include "flashtile/load/tma.h"
#include "flashtile/mainloop/forward_sm90/largest_logits.h"
#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// Loads the tiles of an operand by TMA's boxes. A tile has many, since each lies within a page, and to start one takes
/// a warp some 75 cycles: so each lane loads the box of another page.
template <class Mainloop, int kColumnsOfTile, int kColumnsOfBox, class Barriers, class Tiles>
struct BoxesSm90 {
  using Work = typename Mainloop::Work;
  static constexpr int kN = Mainloop::kN;

  typename Mainloop::Params const& params;
  Barriers& barriers;
  Tiles& tiles;
  CUtensorMap const& map;
  const int rows_of_page;
  const int row = int(threadIdx.x % 32) * params.rows_of_box;  // of the lane's box in the tile
  Pages::Place own{};                                          // where that lies in the cache, of the next block
  int count = 0;                                               // and how many of its rows count
  typename Barriers::Cursor at{};

  CUTE_DEVICE void await(cutlass::arch::ClusterBarrier& barrier, unsigned parity) const { barrier.wait(parity); }

  /// Asks where the rows of the block of a step lie. A box behind the last key has rows of the block's first one once
  /// more: no score of theirs counts.
  CUTE_DEVICE void find(Work const& work, int step) {
    const int key = Mainloop::key_of_step(work, step), used = work.sequence.k.used;
    const int in_tile = min(row, kN - 1);
    const int first = key + in_tile < used ? key + in_tile : key;
    own = params.pages.entry(work.tile.batch, first);
    count = min(params.rows_of_box, used - first);
  }

  /// Loads the block of a step.
  CUTE_DEVICE void load(Work const& work, int step) {
    const Pages::Place place = params.pages.existing(own);
    const TmaRows rows = TmaRows::ragged(place.page * rows_of_page + place.row, count);
    // The table is asked for the next block before this one is loaded: both take long.
    if (const BlockWalk walk = work.keys.walk(); step != walk.last()) find(work, walk.next(step));
    if (threadIdx.x % 32 == 0) barriers.fill(at, [] { return sizeof(tiles[0]); });
    __syncwarp();  // all lanes wait for lane 0, which has waited for the stage to be empty
    if (row < kN)
      load_tile<kN, kColumnsOfTile, kColumnsOfBox>(map, reinterpret_cast<std::uint64_t*>(&barriers.full[at.stage]),
                                                   tiles[at.stage] + row * kColumnsOfBox, rows, 0, work.kv_head);
    at.advance();
  }

  CUTE_DEVICE void finish() const {}
};

/// Gathers the tiles of an operand row by row, by cp.async, where pages or left padding leave boxes of few rows. Two
/// tiles may be on their way at once: one is announced when the next has been asked for, or before anything is waited
/// for that is not there yet, so that nobody waits for a tile that has landed.
///
/// A load from global or local memory returns after the copies that its warp asked for before. So the loop over rows
/// keeps to registers, and loads no more than a table's entries, for a slice of rows at once and a slice ahead.
template <class Mainloop, int kColumnsOfTile, class Barriers, class Tiles>
struct RowsSm90 {
  using Work = typename Mainloop::Work;
  using Element = typename Mainloop::Element;
  static constexpr int kN = Mainloop::kN;
  static constexpr int kColumnsOfBox = columns_per_box(kColumnsOfTile, sizeof(Element));
  static constexpr int kRowsOfLane = 2, kSlice = 32 * kRowsOfLane;  // of a slice each lane looks up so many rows

  typename Mainloop::Params const& params;
  Barriers& barriers;
  Tiles& tiles;
  const void* const origin;  // (rows, H_k, D)
  Strides const& strides;
  const int rows_of_page;
  const int columns;
  Pages::Place own[kRowsOfLane];  // the lane's rows of the next slice
  typename Barriers::Cursor at{};
  bool pending = false;  // whether the tile before `at` is not announced yet

  CUTE_DEVICE void await(cutlass::arch::ClusterBarrier& barrier, unsigned parity) {
    if (pending && !__all_sync(0xffffffff, barrier.test_wait(parity))) finish();
    barrier.wait(parity);
    keep_order();
  }

  /// Finds the rows of the first slice of a step.
  CUTE_DEVICE void find(Work const& work, int step) { find_rows(work, Mainloop::key_of_step(work, step)); }

  /// Asks for the block of a step. Rows behind the last key have that key once more: no score of theirs counts. Columns
  /// behind the head dimension become zero.
  CUTE_DEVICE void load(Work const& work, int step) {
    constexpr int kVector = 16 / sizeof(Element), kBytes = kColumnsOfBox * sizeof(Element);  // of a row of a box
    constexpr int kLanes = kColumnsOfBox / kVector, kRowsAtOnce = 32 / kLanes, kRowsOfSwizzle = 8;
    constexpr int kRowsOfLoop = 16, kCopies = kRowsOfLoop / kRowsAtOnce;
    static_assert(kN % kRowsOfLoop == 0);
    await(barriers.empty[at.stage], at.parity ^ 1);
    int row = int(threadIdx.x % 32) / kLanes;  // of the tile, the lane's
    const int column = int(threadIdx.x % kLanes) * kVector;
    const char* from = static_cast<const char*>(origin) + (work.kv_head * strides.head + column) * sizeof(Element);
    asm volatile("" : "+l"(from));  // else the compiler adds the origin to each row's address
    std::uint32_t to = cute::cast_smem_ptr_to_uint(tiles[at.stage]) +
                       Mainloop::template place_in_box<kBytes>(row, column * int(sizeof(Element)));
    unsigned found[kRowsOfLane] = {};
    CUTE_NO_UNROLL
    for (; row < kN; row += kRowsOfLoop, to += kRowsOfLoop * kBytes) {
      if (row % kSlice < kRowsOfLoop) {
        CUTE_UNROLL
        for (int i = 0; i < kRowsOfLane; ++i) {
          const Pages::Place place = params.pages.existing(own[i]);
          found[i] = (place.page * rows_of_page + place.row) * unsigned(sizeof(Element));
        }
        const int first = row / kSlice * kSlice + kSlice;
        if (first < kN)
          find_rows(work, Mainloop::key_of_step(work, step) + first);
        else if (const BlockWalk walk = work.keys.walk(); step != walk.last())
          find(work, walk.next(step));
      }
      // A lane's answer to another comes behind the copies that were asked for before: so all are asked for first.
      const unsigned of_lane = row % kSlice < 32 ? found[0] : found[1];
      unsigned rows[kCopies];
      CUTE_UNROLL
      for (int i = 0; i < kCopies; ++i) rows[i] = __shfl_sync(0xffffffff, of_lane, row + i * kRowsAtOnce);  // modulo 32
      CUTE_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        // Four rows further, the other half of a row of 128 bytes is meant: its pieces are swizzled by its number.
        const int further = i * kRowsAtOnce;
        const std::uint32_t place = (to ^ further % kRowsOfSwizzle * 16) + further * kBytes;
        const char* const of_row = from + rows[i] * strides.row;
        CUTE_UNROLL
        for (int box = 0; box < kColumnsOfTile; box += kColumnsOfBox)
          copy(of_row + box * int(sizeof(Element)), place + box * kN * int(sizeof(Element)), box + column < columns);
      }
    }
    cute::cp_async_fence();
    if (pending) announce<1>();
    pending = true;
    at.advance();
  }

  CUTE_DEVICE void finish() {
    if (pending) announce<0>();
    pending = false;
  }

 private:
  /// Finds the lane's rows of the slice from `key` on: rows that exist, whatever key it is. A table's entries come from
  /// the L2 cache, to which those of rows to come are on their way.
  CUTE_DEVICE void find_rows(Work const& work, int key) {
    const auto row_of = [&](int key) { return int(work.k_rows.before) + min(key, work.sequence.k.used - 1); };
    const Pages& pages = params.pages;
    const int lane = int(threadIdx.x % 32);
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) own[i] = pages.entry(work.tile.batch, row_of(key + 32 * i + lane));
    if (pages.table != nullptr) {
      const int later = row_of(key + 3 * kSlice + lane * kRowsOfLane);
      asm volatile("prefetch.global.L2 [%0];" ::"l"(pages.place_in_table(work.tile.batch, pages.index_of(later))));
    }
  }

  /// Copies 16 bytes, or writes as many zeros if nothing `exists` there.
  CUTE_DEVICE static void copy(const char* from, std::uint32_t to, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0));
  }

  /// Waits until all tiles have landed but the last kOnTheirWay, and announces the one before these.
  template <int kOnTheirWay>
  CUTE_DEVICE void announce() const {
    cute::cp_async_wait<kOnTheirWay>();
    cutlass::arch::fence_view_async_shared();  // matmuls read it by another way
    __syncwarp();
    if (threadIdx.x % 32 == 0) barriers.full[at.previous().stage].arrive();
  }
};

/// Loads tiles over pages: a warp those of K, and one those of V. That of V exchanges the largest logits, too, where
/// they are wanted: the fourth warp hands out tiles, and none is left for that alone.
template <class Mainloop>
struct PagesProducerSm90 {
  using Params = typename Mainloop::Params;
  using SharedStorage = typename Mainloop::SharedStorage;
  using Work = typename Mainloop::Work;

  Params const& params;
  SharedStorage& shared;

  CUTE_DEVICE void run_keys() {
    const auto loaded = [&](Work& work, int n_block) {
      if (threadIdx.x % 32 != 0) return;
      const BlockWalk walk = work.keys.walk();
      if (n_block == max(walk.end() - Mainloop::kBlocksAhead, walk.first())) shared.near_end.arrive();
    };
    constexpr int kColumns = Mainloop::kHeadDim;
    ForwardParams const& forward = params.forward;
    if constexpr (Mainloop::kWidens)
      run(boxes<kColumns>(shared.few.k_barriers, shared.rows_of_k, params.k, params.k_rows), loaded);
    else if (params.rows_of_box > 0)
      run(boxes<kColumns>(shared.k_barriers, shared.k, params.k, params.k_rows), loaded);
    else
      run(rows<kColumns>(shared.k_barriers, shared.k, forward.k, forward.k_strides, params.k_rows, forward.head_dim),
          loaded);
  }
  CUTE_DEVICE void run_values() {
    const auto loaded = [&](Work& work, int n_block) {
      if constexpr (Mainloop::kExchangesLargest)
        LargestLogitsExchange<Mainloop>{params.forward, shared}.run_beside(work, n_block - work.keys.walk().first());
    };
    constexpr int kColumns = Mainloop::kHeadDimV;
    ForwardParams const& forward = params.forward;
    if constexpr (Mainloop::kWidens)
      run(boxes<kColumns>(shared.few.v_barriers, shared.rows_of_v, params.v, params.v_rows), loaded);
    else if (params.rows_of_box > 0)
      run(boxes<kColumns>(shared.v_barriers, shared.v, params.v, params.v_rows), loaded);
    else
      run(rows<kColumns>(shared.v_barriers, shared.v, forward.v, forward.v_strides, params.v_rows, forward.head_dim_v),
          loaded);
  }

 private:
  template <int kColumns, class Barriers, class Tiles>
  CUTE_DEVICE auto boxes(Barriers& barriers, Tiles& tiles, CUtensorMap const& map, int rows_of_page) const {
    constexpr int kColumnsOfBox = columns_per_box(kColumns, sizeof(tiles[0][0]));
    return BoxesSm90<Mainloop, kColumns, kColumnsOfBox, Barriers, Tiles>{params, barriers, tiles, map, rows_of_page};
  }
  template <int kColumns, class Barriers, class Tiles>
  CUTE_DEVICE auto rows(Barriers& barriers, Tiles& tiles, const void* origin, Strides const& strides, int rows_of_page,
                        int columns) const {
    return RowsSm90<Mainloop, kColumns, Barriers, Tiles>{params,  barriers,     tiles,  origin,
                                                         strides, rows_of_page, columns};
  }

  /// Loads the tiles of one operand as `source` does, block after block; after each, all lanes call `loaded(work,
  /// block)`.
  template <class Source, class Loaded>
  CUTE_DEVICE void run(Source source, Loaded&& loaded) {
    typename Ring<Mainloop::kWorks>::Cursor work_at{};
    CUTE_NO_UNROLL
    for (;; work_at.advance()) {
      source.await(shared.work_barriers.full[work_at.stage], work_at.parity);
      keep_order();
      Work& work = shared.work[work_at.stage];
      if (work.keys.blocks < 0) break;
      const auto walk = [&] { return work.keys.walk(); };  // read from shared memory each time: registers are scarce
      if (!walk().empty()) source.find(work, walk().first());
      CUTE_NO_UNROLL
      for (int n_block = walk().first(); n_block < walk().end(); n_block = walk().next(n_block)) {
        source.load(work, n_block);
        loaded(work, n_block);
      }
      if (threadIdx.x % 32 == 0) shared.work_barriers.release_by_thread(work_at);
    }
    source.finish();
  }
};

}  // namespace flashtile
