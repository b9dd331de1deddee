// Tiles of query rows against all keys they see, on Hopper's warpgroup matmuls (FlashAttention-3, Shah et al. 2024).
//
// One thread hands out tiles, another has TMA bring them into rings of shared memory. Each consumer warpgroup owns
// 64 whole rows of Q. Warpgroups take turns at the tensor cores: in its turn one asks for the scores of a block and for
// P·V of the block before together; then it turns those scores into weights while the others have theirs. At the end of
// a tile P·V comes first, while the next Q arrives, and the rows are finished under the first scores of the next tile.
// So the tensor cores see one stream of blocks, across tiles too.
//
// No row maximum is taken after the first block of a tile: see OnlineSoftmax.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/barrier.h"
#include "flashtile/cache.h"
#include "flashtile/launch.h"
#include "flashtile/load/tma.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mainloop/wgmma.h"
#include "flashtile/marked_count.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/math/round.h"
#include "flashtile/math/visible_keys.h"
#include "flashtile/params.h"
#include "flashtile/scheduler/few_sequences.h"
#include "flashtile/scheduler/persistent.h"
#include "flashtile/variant.h"

namespace flashtile {

struct ForwardParamsSm90 {
  ForwardParams forward;
  CUtensorMap q, k, v, out;  // tiles of M, N, N rows; of the output as the epilogue stores them
  PersistentScheduler scheduler;
  MarkedCount taken;  // of a few ragged sequences, tiles asked for so far, after the first of each thread block
};

/// Over keys and values in pages: all rows of them stand one behind the other, and a box holds rows of one page.
struct PagedForwardParamsSm90 : ForwardParamsSm90 {
  Pages pages;
  int rows_of_box;  // divides a page and a tile
};

template <Variant kV, bool kPaged = false>
struct ForwardMainloopSm90 {
  using Params = std::conditional_t<kPaged, PagedForwardParamsSm90, ForwardParamsSm90>;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr Features kFeatures = kV.features;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr int kHeadDimV = kV.head_dim_v;
  static constexpr int kStages = kV.stages / 2;  // key blocks, each a tile of K and one of V
  static constexpr int kWarpgroups = kM / 64;    // consumers
  static constexpr ForwardMemorySm90 kMemory = ForwardMemorySm90::of(kV);
  static constexpr int kStagesQ = kMemory.stages_q;
  static_assert(kV.warps == 4 * (kWarpgroups + 1) && kV.stages % 2 == 0 && kM % 64 == 0 && kN % 16 == 0 &&
                kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);

  using Element = std::conditional_t<kV.dtype == DType::kFloat16, cute::half_t, cute::bfloat16_t>;
  using ShapeQK = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kHeadDim>>;
  using ShapePV = cute::Shape<cute::Int<kM>, cute::Int<kHeadDimV>, cute::Int<kN>>;
  using Warpgroups = cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>;

  // Where registers allow, Q comes from them: that spares a fifth of the reads of shared memory, and power with them.
  static constexpr int kRegisters = kWarpgroups == 2 ? 240 : 160;                           // of a consumer
  static constexpr int kRegistersOfTiles = kHeadDimV / 2 + kHeadDim / 4 + kN / 2 + kN / 4;  // O, Q, S, P
  static constexpr bool kKeepQ = kRegistersOfTiles <= kRegisters * 5 / 6;
  static constexpr auto op_qk() {
    using namespace cute::SM90;
    if constexpr (kKeepQ)
      return GMMA::rs_op_selector<Element, Element, float, ShapeQK>();
    else
      return GMMA::ss_op_selector<Element, Element, float, ShapeQK>();
  }
  using MmaQK = decltype(cute::make_tiled_mma(op_qk(), Warpgroups{}));
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<Element, Element, float, ShapePV, cute::SM90::GMMA::Major::K,
                                       cute::SM90::GMMA::Major::MN>(),
      Warpgroups{}));

  // Columns of one TMA box: 128 bytes, 64 where the head dimension is no multiple of 64.
  static constexpr int columns_per_box(int head_dim) { return head_dim % 64 == 0 ? 64 : 32; }
  static constexpr int kColumns = columns_per_box(kHeadDim);
  static constexpr int kColumnsV = columns_per_box(kHeadDimV);
  template <int kColumnsPerBox>
  using AtomK = std::conditional_t<kColumnsPerBox == 64, cute::SM90::GMMA::Layout_K_SW128_Atom<Element>,
                                   cute::SM90::GMMA::Layout_K_SW64_Atom<Element>>;
  using AtomMN = std::conditional_t<kColumnsV == 64, cute::SM90::GMMA::Layout_MN_SW128_Atom<Element>,
                                    cute::SM90::GMMA::Layout_MN_SW64_Atom<Element>>;
  using SmemLayoutQ = decltype(cute::tile_to_shape(
      AtomK<kColumns>{}, cute::Shape<cute::Int<kM>, cute::Int<kHeadDim>, cute::Int<kStagesQ>>{}));
  using SmemLayoutK = decltype(cute::tile_to_shape(
      AtomK<kColumns>{}, cute::Shape<cute::Int<kN>, cute::Int<kHeadDim>, cute::Int<kStages>>{}));
  // V as the matmul sees it, (head_dim, N): the same memory as (N, head_dim) rows.
  using SmemLayoutVt =
      decltype(cute::tile_to_shape(AtomMN{}, cute::Shape<cute::Int<kHeadDimV>, cute::Int<kN>, cute::Int<kStages>>{},
                                   cute::Step<cute::_2, cute::_1, cute::_3>{}));

  // Blocks that need no mask have a loop of their own, where registers allow a third copy of the step.
  static constexpr bool kPeelInterior = kHeadDimV < 192;

  static constexpr int kRowsOfWarp = 16;  // of the output, as it is staged
  using SmemLayoutO =
      decltype(cute::tile_to_shape(AtomK<kColumnsV>{}, cute::Shape<cute::Int<kRowsOfWarp>, cute::Int<kHeadDimV>>{}));
  static constexpr int kStagingWarps = kMemory.staged ? kM / kRowsOfWarp : 1;
  static constexpr int kStagingPerWarp = kMemory.staged ? kRowsOfWarp * kHeadDimV : 8;  // next to nothing where unused

  /// What is told of a tile. No key block at all: its rows see nothing. Fewer: there are no more tiles.
  struct Work {
    TileCoord tile;
    int kv_head;
    Sequence sequence;
    TmaRows q_rows, k_rows;
    VisibleKeys<kN> keys;
  };
  // A tile stays in use until the next one has begun. Of ragged sequences none is handed out until so many key blocks
  // of the one before are left to load: what is handed out nobody else can take.
  static constexpr int kWorks = 4;
  static constexpr int kBlocksAhead = kStages + 3;

  struct SharedStorage {
    alignas(1024) Element q[kStagesQ][kM * kHeadDim];
    alignas(1024) Element k[kStages][kN * kHeadDim];
    alignas(1024) Element v[kStages][kN * kHeadDimV];
    alignas(1024) Element staging[kStagingWarps][kStagingPerWarp];
    Work work[kWorks];
    FewSequences few;
    Ring<kWorks> work_barriers;
    cutlass::arch::ClusterBarrier near_end;  // of a tile's loads: the producer arrives, a ragged scheduler waits
    Ring<kStagesQ> q_barriers[kWarpgroups];  // of each one's rows
    Ring<kStages> k_barriers, v_barriers;

    /// By one thread, before any other touches the barriers.
    CUTE_DEVICE void init_barriers() {
      work_barriers.init(128 * kWarpgroups + 1);
      near_end.init(1);
      CUTE_UNROLL
      for (auto& barriers : q_barriers) barriers.init(kKeepQ ? 128 : 4);
      k_barriers.init(4 * kWarpgroups);
      v_barriers.init(4 * kWarpgroups);
      cutlass::arch::fence_barrier_init();
    }
  };
  using Softmax = OnlineSoftmax<2>;

  /// Hands out tiles: those of the plan, or, where sequences are ragged, the next that nobody has taken. A warp, of
  /// which one thread does all but place a few sequences.
  struct Scheduler {
    Params const& params;
    SharedStorage& shared;
    typename Ring<kWorks>::Cursor at{};

    /// `write(work)` writes what is handed out.
    template <class Write>
    CUTE_DEVICE void hand_out(Write&& write) {
      shared.work_barriers.fill(at, [&] {
        write(shared.work[at.stage]);
        return 0;
      });
      at.advance();
    }

    /// Of the sequence whose spans `span_of(&Sequence::q)` and `span_of(&Sequence::k)` are.
    template <class SpanOf>
    CUTE_DEVICE void hand_out(TileCoord tile, SpanOf&& span_of) {
      hand_out([&](Work& work) {
        ForwardParams const& forward = params.forward;
        const auto forget = [] { asm volatile("" ::: "memory"); };  // registers are few: what is needed is read again
        work.tile = tile;
        forget();
        work.sequence.q = span_of(&Sequence::q);
        forget();
        work.sequence.k = span_of(&Sequence::k);
        forget();
        const Span &q = work.sequence.q, &k = work.sequence.k;
        work.kv_head = forward.group.quotient(forward.packing.first_head(work.tile.head));
        forget();
        work.q_rows = TmaRows::of(forward.sequences.q, work.tile.batch, q, q.used);
        forget();
        work.k_rows = TmaRows::of(forward.sequences.k, work.tile.batch, k, k.used);
        forget();
        const Range queries = forward.packing.queries(work.tile.m_block * kM, kM, q.used);
        if constexpr (kPaged) {  // so that boxes lie within pages
          const int first = forward.band.columns(queries.begin, work.sequence.lengths()).begin / kN * kN;
          work.keys = VisibleKeys<kN>(forward.band, queries, work.sequence.lengths(), first);
        } else {
          work.keys = VisibleKeys<kN>(forward.band, queries, work.sequence.lengths());
        }
      });
    }

    /// Hands out tiles one by one, from the thread block's own on: `find(index, tile)` says whether there is one, of
    /// the sequence whose spans are `span_of(tile, side)`. `begin()` follows the first; `take()` says how many were
    /// taken.
    template <class Find, class SpanOf, class Begin, class Take>
    CUTE_DEVICE void hand_out_ragged(Find&& find, SpanOf&& span_of, Begin&& begin, Take&& take) {
      unsigned index = blockIdx.x, parity = 0;
      TileCoord tile;
      CUTE_NO_UNROLL
      while (find(index, tile)) {
        Work const& work = shared.work[at.stage];
        hand_out(tile, [&](auto side) { return span_of(tile, side); });
        if (index == blockIdx.x) begin();
        if (work.keys.blocks > 0) {
          shared.near_end.wait(parity);
          parity ^= 1;
        }
        unsigned blocks;
        asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));  // or the compiler keeps it where there is no room
        index = blocks + unsigned(take());
      }
    }

    CUTE_DEVICE void hand_out_listed() {
      RaggedOrder const& order = params.forward.ragged;
      RaggedTile found;
      await_kernel_before();
      hand_out_ragged(
          [&](unsigned index, TileCoord& tile) {
            if (!order.tiles.find(index, order.heads.value, true, found)) return false;
            tile = {found.entry->batch, found.head, found.block};
            return true;
          },
          [&](TileCoord, auto side) { return found.entry->sequence.*side; }, [] {},
          [&] { return atomicAdd(order.tiles.taken, 1); });
    }

    CUTE_DEVICE void hand_out_few(int tiles) {
      int part = 0;
      hand_out_ragged(
          [&](unsigned index, TileCoord& tile) {
            if (index >= unsigned(tiles)) return false;
            tile = shared.few.find(index, params.forward.ragged, part);
            return true;
          },
          [&](TileCoord tile, auto side) { return shared.few.sequences[tile.batch].*side; },
          [&] { params.taken.begin(params.taken.found()); },
          [&] {
            const int taken = params.taken.add(cuda::memory_order_relaxed);
            if (taken == tiles - 1) params.taken.clear();  // each thread block that had a tile asks once in vain
            return taken;
          });
    }

    CUTE_DEVICE void hand_out_dense() {
      PersistentScheduler const& scheduler = params.scheduler;
      Sequences const& sequences = params.forward.sequences;
      const int size_q = sequences.q.size, size_k = sequences.k.size;
      const Sequence whole{{0, size_q, size_q}, {0, size_k, size_k}};
      CUTE_NO_UNROLL
      for (int n = 0; n < scheduler.tiles_of(blockIdx.x); ++n)
        hand_out(scheduler.tile(scheduler.index(n, blockIdx.x)), [&](auto side) { return whole.*side; });
    }

    CUTE_DEVICE void run() {
      ForwardParams const& forward = params.forward;
      const bool leads = threadIdx.x % 32 == 0;
      if (!forward.sequences.q.ragged()) {
        if (!leads) return;
        hand_out_dense();
      } else if (params.taken.given()) {
        const int tiles = shared.few.place(forward.sequences, forward.ragged) * forward.ragged.heads.value;
        if (!leads) return;
        hand_out_few(tiles);
      } else {
        if (!leads) return;
        hand_out_listed();
      }
      hand_out([](Work& end) { end.keys.blocks = -1; });
    }
  };

  /// Brings Q, K and V, in the order in which consumers make room: the K of each block, then the V of the block before
  /// it, across tiles too, and Q after both: K0, Q, K1, V0, …, Kn, Vn-1, K0, Vn, Q, K1, V0, …
  ///
  /// One thread does so; over pages a warp, each lane for the boxes of one page.
  struct Producer {
    Params const& params;
    SharedStorage& shared;
    typename Ring<kStagesQ>::Cursor q_at{};
    typename Ring<kStages>::Cursor at{};  // the next block

    CUTE_DEVICE static bool leads() { return !kPaged || threadIdx.x % 32 == 0; }

    template <class Barriers, class Cursor, class Prepare>
    CUTE_DEVICE std::uint64_t* fill(Barriers& barriers, Cursor at, Prepare&& prepare) {
      if (leads()) barriers.fill(at, prepare);
      if (kPaged) __syncwarp();  // the stage is empty for all lanes
      return reinterpret_cast<std::uint64_t*>(&barriers.full[at.stage]);
    }

    /// Of pages, the rows of a lane's box of the block that begins with `key`. Behind the last key stand rows of the
    /// first ones once more: no score of theirs counts.
    CUTE_DEVICE TmaRows rows_of_lane(Work const& work, int key) const {
      const int row = min(int(threadIdx.x % 32) * params.rows_of_box, kN - 1), used = work.sequence.k.used;
      const int first = key + row < used ? key + row : key;
      const int rows = min(params.rows_of_box, used - first);
      const Pages::Place place = params.pages.at(work.tile.batch, first);
      return TmaRows::ragged(place.page * params.pages.size.value + place.row, rows);
    }

    /// The tile of K or V of the block that begins with `key`, over pages of the rows that lanes know.
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

    CUTE_DEVICE void load_q(Work const& work) {
      // Not unrolled: registers are few.
      CUTE_NO_UNROLL
      for (int w = 0; w < kWarpgroups; ++w) {
        constexpr int kRows = kM / kWarpgroups;
        std::uint64_t* barrier = fill(shared.q_barriers[w], q_at, [] { return kRows * kHeadDim * sizeof(Element); });
        if (leads())
          load_tile<kM, kHeadDim, kColumns>(params.q, barrier, shared.q[q_at.stage] + w * kRows * kColumns, work.q_rows,
                                            params.forward.packing.query(work.tile.m_block * kM + w * kRows),
                                            params.forward.packing.first_head(work.tile.head));
      }
      q_at.advance();
    }

    CUTE_DEVICE void run() {
      auto& works = shared.work_barriers;
      typename Ring<kWorks>::Cursor work_at{};
      // The block whose V is still to come, of the tile in hand or of the one before.
      int v_key = -1;
      TmaRows rows, v_rows;  // of pages: of the next block, looked up a block ahead, and of the one whose V is to come
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
        int key = work.keys.first;
        const int end = key + work.keys.blocks * kN;
        if constexpr (kPaged) {
          if (key < end) rows = rows_of_lane(work, key);
        }
        CUTE_NO_UNROLL
        for (; key < end; key += kN) {
          std::uint64_t* barrier = fill(shared.k_barriers, at, [] { return sizeof(SharedStorage::k[0]); });
          load_keys<kHeadDim, kColumns>(params.k, barrier, shared.k[at.stage], work, key, rows);
          load_v(key == work.keys.first);
          if (key == work.keys.first) {
            if (v_key >= 0 && leads()) works.release_by_thread(work_at.previous());
            load_q(work);
          }
          if (key == max(end - kBlocksAhead * kN, work.keys.first) && leads()) shared.near_end.arrive();
          v_key = key;
          if constexpr (kPaged) {
            v_rows = rows;
            if (key + kN < end) rows = rows_of_lane(work, key + kN);
          }
          at.advance();
        }
      }
    }
  };

  /// A thread of the consumer warpgroups; `thread` counts from the first of them.
  struct Consumer {
    Params const& params;
    SharedStorage& shared;
    int thread;

    /// Computes tile after tile. Calls `finish(work, accumulators, softmax state)`, or `skip(work)` if it sees no key.
    template <class Finish, class Skip>
    CUTE_DEVICE void run(Finish&& finish, Skip&& skip) {
      using namespace cute;
      MmaQK mma_qk;
      MmaPV mma_pv;
      // With a single stage of Q its descriptors are constants, which wait in ordinary registers.
      const int warpgroup = kStagesQ == 1 ? thread / 128 : uniform(thread / 128);
      auto qk_warpgroup = mma_qk.get_slice(warpgroup * 128);
      auto qk_thread = mma_qk.get_slice(thread);
      auto pv_thread = mma_pv.get_slice(thread);
      Tensor sQ = make_tensor(make_smem_ptr(shared.q[0]), SmemLayoutQ{});    // (M, head_dim, stage)
      Tensor sK = make_tensor(make_smem_ptr(shared.k[0]), SmemLayoutK{});    // (N, head_dim, stage)
      Tensor sVt = make_tensor(make_smem_ptr(shared.v[0]), SmemLayoutVt{});  // (head_dim, N, stage)
      Tensor tSrQ = [&] {
        if constexpr (kKeepQ)
          return qk_thread.partition_fragment_A(sQ(_, _, 0));  // (mma, m, k)
        else
          return qk_warpgroup.partition_fragment_A(sQ);  // (mma, m, k, stage)
      }();
      Tensor tSrK = qk_thread.partition_fragment_B(sK);             // (mma, n, k, stage)
      Tensor tOrV = pv_thread.partition_fragment_B(sVt);            // (mma, head_dim, k, stage)
      Tensor cS = make_identity_tensor(Shape<Int<kM>, Int<kN>>{});  // (M, N)
      Tensor tScS = rows_and_columns(qk_thread.partition_C(cS));    // (row, column)
      Tensor tSrS = partition_fragment_C(mma_qk, shape(cS));        // (mma, m, n)
      Tensor tOrP = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kN / 16>>>{});  // (mma, m, k)
      Tensor tOrO = partition_fragment_C(mma_pv, Shape<Int<kM>, Int<kHeadDimV>>{});              // (mma, m, head_dim)

      typename Ring<kWorks>::Cursor work_at{};  // the tile in hand
      typename Ring<kStagesQ>::Cursor q_at{};
      // Two cursors, though one follows the other: a step uses each and then advances it, so both stay uniform.
      typename Ring<kStages>::Cursor k_at{};  // the next block
      typename Ring<kStages>::Cursor v_at{};  // the block in hand
      const Turns<kWarpgroups> turns{warpgroup};
      const bool maps = params.forward.score_map.maps();
      const bool drops = kKnowsDropout && params.forward.dropout.active();
      Softmax softmax(params.forward.score_map.unit_log2);
      int blocks;
      Range interior;
      // Waits for the rows of Q, and where they are kept in registers gives their place back at once.
      const auto take_q = [&] {
        auto& barriers = shared.q_barriers[warpgroup];
        barriers.wait_full(q_at);
        if constexpr (kKeepQ) {
          const auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma_qk);
          const auto copy_q_thread = copy_q.get_slice(thread);
          copy(copy_q, copy_q_thread.partition_S(sQ(_, _, q_at.stage)), copy_q_thread.retile_D(tSrQ));
          barriers.release_by_thread(q_at);
          q_at.advance();
        }
      };
      const auto start_scores = [&](int k_stage) {
        const int q_stage = kKeepQ || kStagesQ == 1 ? 0 : uniform(q_at.stage);
        if constexpr (kKeepQ)
          start_matmul(mma_qk, tSrQ, tSrK(_, _, _, k_stage), tSrS, SM90::GMMA::ScaleOut::Zero);
        else
          start_matmul(mma_qk, tSrQ(_, _, _, q_stage), tSrK(_, _, _, k_stage), tSrS, SM90::GMMA::ScaleOut::Zero);
      };
      // When the scores of a block are there.
      const auto release_operands = [&](int n_block) {
        shared.k_barriers.release_by_warp(k_at);
        k_at.advance();
        if (!kKeepQ && n_block + 1 == blocks) {
          shared.q_barriers[warpgroup].release_by_warp(q_at);
          q_at.advance();
        }
      };
      // Whether the next tile sees a key; else it sees none, or is none.
      const auto next_tile = [&] {
        shared.work_barriers.wait_full(work_at);
        Work const& work = shared.work[work_at.stage];
        blocks = work.keys.blocks;
        interior = work.keys.interior;
        return blocks > 0;
      };
      const auto finish_work = [&](typename Ring<kWorks>::Cursor at) {
        finish(shared.work[at.stage], tOrO, softmax);
        shared.work_barriers.release_by_thread(at);
      };
      // Scores to weights. Few blocks outgrow the reference that the tile's first block has set, and few rows are
      // steep: these are left to weigh_again(), and false is returned. So the loops hold what all blocks need and
      // nothing else.
      const auto weigh = [&](int n_block, auto first, auto interior_only) __attribute__((always_inline)) {
        constexpr bool kFirst = decltype(first)::value;
        Tensor scores = rows_and_columns(tSrS);  // (row, column)
        const bool edge = !interior.contains(n_block);
        if (!interior_only && (edge || maps)) {
          Work const& work = shared.work[work_at.stage];
          const ScoreTile<ForwardParams> score_tile{params.forward, work.tile, work.tile.m_block * kM,
                                                    work.keys.lengths};
          if (maps) score_tile.template map<Softcaps::kUsual>(scores, tScS, n_block * kN);
          if (edge) score_tile.mask(scores, tScS, n_block * kN);
        }
        if (kFirst) softmax.begin(scores);
        float added[2];
        softmax.weigh(tSrS, tOrP, added, false);  // without a branch before it, it begins while P·V is waited for
        if (softmax.steep || (!kFirst && softmax.outgrown(added))) return false;
        softmax.row[0].sum += added[0];
        softmax.row[1].sum += added[1];
        return true;
      };
      // Weighs the block anew, with references that its scores do not exceed, and of steep rows with differences formed
      // before they are multiplied. The references of a tile's first block are its maxima already, so raise() leaves
      // them; the sums that it scales are 0 then, and the next P·V overwrites O.
      const auto weigh_again = [&] {
        Tensor scores = rows_and_columns(tSrS);
        float factor[2], added[2];
        softmax.raise(scores, factor);
        scale_rows(rows_and_columns(tOrO), factor);
        softmax.relate(scores);
        softmax.weigh(tSrS, tOrP, added, true);
        softmax.row[0].sum += added[0];
        softmax.row[1].sum += added[1];
      };
      const auto drop = [&](int n_block) {
        Work const& work = shared.work[work_at.stage];
        KeptOf<decltype(tScS)>::template of<Rows::kQueries>(params.forward.dropout, work.tile.batch, work.tile.head,
                                                            tScS, work.tile.m_block * kM,
                                                            work.keys.first + n_block * kN)
            .keep_words(recast<std::uint32_t>(tOrP));
      };

      turns.begin();
      auto opening = SM90::GMMA::ScaleOut::Zero;  // the first P·V of a tile overwrites what the last one left
      const auto start_output = [&] {
        shared.v_barriers.wait_full(v_at);
        start_matmul(mma_pv, tOrP, tOrV(_, _, _, v_at.stage), tOrO, opening);
      };
      // P·V of the block in hand, and the weights of the next one.
      const auto step = [&](int n_block, auto interior_only) __attribute__((always_inline)) {
        shared.k_barriers.wait_full(k_at);
        turns.await();
        start_scores(k_at.stage);
        start_output();
        turns.pass();
        wait_matmul<1>(tSrS);
        release_operands(n_block);
        wait_matmul<0>(tOrO);
        shared.v_barriers.release_by_warp(v_at);
        v_at.advance();
        opening = SM90::GMMA::ScaleOut::One;
        return weigh(n_block, false_type{}, interior_only);
      };
      CUTE_NO_UNROLL
      while (true) {
        if (!next_tile()) {
          if (blocks < 0) return;
          skip(shared.work[work_at.stage]);
          shared.work_barriers.release_by_thread(work_at);
          work_at.advance();
          continue;
        }
        take_q();
        shared.k_barriers.wait_full(k_at);
        turns.await();
        start_scores(k_at.stage);
        turns.pass();
        wait_matmul<0>(tSrS);
        while (true) {
          release_operands(0);
          opening = SM90::GMMA::ScaleOut::Zero;
          int n_block = 0;
          bool weighed = weigh(0, true_type{}, false_type{});
          CUTE_NO_UNROLL
          while (true) {
            if (!weighed) [[unlikely]]
              weigh_again();
            if (drops) drop(n_block);
            if (++n_block == blocks) break;
            if (kPeelInterior && !maps && !drops && interior.contains(n_block)) {
              CUTE_NO_UNROLL
              while ((weighed = step(n_block, true_type{})) && n_block + 1 < interior.end) ++n_block;
            } else {
              weighed = step(n_block, false_type{});
            }
          }
          const auto last_at = work_at;
          work_at.advance();
          if (!next_tile()) {
            start_output();
            wait_matmul<0>(tOrO);
            shared.v_barriers.release_by_warp(v_at);
            v_at.advance();
            finish_work(last_at);
            break;
          }
          turns.await();
          start_output();
          take_q();
          shared.k_barriers.wait_full(k_at);
          start_scores(k_at.stage);
          turns.pass();
          wait_matmul<1>(tOrO);
          shared.v_barriers.release_by_warp(v_at);
          v_at.advance();
          finish_work(last_at);
          wait_matmul<0>(tSrS);
        }
      }
    }
  };
};

}  // namespace flashtile
