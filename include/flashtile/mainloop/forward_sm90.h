// Tiles of query rows against all keys they see, on Hopper's warpgroup matmuls (FlashAttention-3, Shah et al. 2024).
//
// A producer thread hands out tiles and has TMA bring them into a ring of shared memory. Each consumer warpgroup owns
// 64 whole rows of Q. Warpgroups take turns at the tensor cores: in its turn one asks for the scores of a block and for
// P·V of the block before together; then it turns those scores into weights while the others have theirs. At the end of
// a tile P·V comes first, while the next Q arrives, and the rows are finished under the first scores of the next tile.
// So the tensor cores see one stream of blocks, across tiles too.
//
// No row maximum is taken after the first block of a tile: see OnlineSoftmax.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/barrier.h"
#include "flashtile/load/tma.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mainloop/wgmma.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/math/round.h"
#include "flashtile/math/visible_keys.h"
#include "flashtile/params.h"
#include "flashtile/scheduler/persistent.h"
#include "flashtile/variant.h"

namespace flashtile {

struct ForwardParamsSm90 {
  ForwardParams forward;
  CUtensorMap q, k, v, out;  // tiles of M, N, N rows; of the output as the epilogue stores them
  PersistentScheduler scheduler;
};

template <Variant kV>
struct ForwardMainloopSm90 {
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr bool kEveryOption = kV.every_option;
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

  /// What consumers are told of a tile. No key block at all: its rows see nothing. Fewer: there are no more tiles.
  struct Work {
    TileCoord tile;
    VisibleKeys<kN> keys;
  };

  struct SharedStorage {
    alignas(1024) Element q[kStagesQ][kM * kHeadDim];
    alignas(1024) Element k[kStages][kN * kHeadDim];
    alignas(1024) Element v[kStages][kN * kHeadDimV];
    alignas(1024) Element staging[kStagingWarps][kStagingPerWarp];
    Work work[2];
    Ring<2> work_barriers;
    Ring<kStagesQ> q_barriers[kWarpgroups];  // of each one's rows
    Ring<kStages> k_barriers, v_barriers;

    /// By one thread, before any other touches the barriers.
    CUTE_DEVICE void init_barriers() {
      work_barriers.init(128 * kWarpgroups);
      CUTE_UNROLL
      for (auto& barriers : q_barriers) barriers.init(kKeepQ ? 128 : 4);
      k_barriers.init(4 * kWarpgroups);
      v_barriers.init(4 * kWarpgroups);
      cutlass::arch::fence_barrier_init();
    }
  };
  using Softmax = OnlineSoftmax<2>;

  /// One thread hands out tiles and brings their Q, K and V, in the order in which consumers make room: the K of each
  /// block before the V of the block ahead of it, across tiles too, and Q after both: K0, Q, K1, V0, …, Kn, Vn-1, K0,
  /// Vn, Q, K1, V0, …
  struct Producer {
    ForwardParamsSm90 const& params;
    SharedStorage& shared;
    typename Ring<2>::Cursor work_at{};
    typename Ring<kStagesQ>::Cursor q_at{};
    typename Ring<kStages>::Cursor at{};  // the next block

    CUTE_DEVICE void hand_out(Work const& work) {
      shared.work_barriers.fill(work_at, [&] {
        shared.work[work_at.stage] = work;
        return 0;
      });
      work_at.advance();
    }

    CUTE_DEVICE void load_q(TileCoord tile) {
      CUTE_UNROLL
      for (int w = 0; w < kWarpgroups; ++w) {
        constexpr int kRows = kM / kWarpgroups;
        std::uint64_t* barrier = shared.q_barriers[w].fill(q_at, [] { return kRows * kHeadDim * sizeof(Element); });
        load_tile<kM, kHeadDim, kColumns>(params.q, barrier, shared.q[q_at.stage] + w * kRows * kColumns,
                                          params.forward.packing.query(tile.m_block * kM + w * kRows), tile.head,
                                          tile.batch);
      }
      q_at.advance();
    }

    CUTE_DEVICE int kv_head(TileCoord tile) const {
      return params.forward.packing.first_head(tile.head) / params.forward.group;
    }

    CUTE_DEVICE void run() {
      PersistentScheduler const& scheduler = params.scheduler;
      Lengths const& lengths = params.forward.lengths;
      TileCoord v_tile;
      int v_key = -1;
      typename Ring<kStages>::Cursor v_at{};
      const auto load_v = [&] {
        if (v_key < 0) return;
        std::uint64_t* barrier = shared.v_barriers.fill(v_at, [] { return sizeof(SharedStorage::v[0]); });
        load_tile<kN, kHeadDimV, kColumnsV>(params.v, barrier, shared.v[v_at.stage], v_key, kv_head(v_tile),
                                            v_tile.batch);
      };
      CUTE_NO_UNROLL
      for (int n = 0; n < scheduler.tiles_of(blockIdx.x); ++n) {
        const TileCoord tile = scheduler.tile(scheduler.index(n, blockIdx.x));
        const Range queries = params.forward.packing.queries(tile.m_block * kM, kM, lengths.q);
        const VisibleKeys<kN> keys(params.forward.band, queries, lengths);
        hand_out({tile, keys});
        CUTE_NO_UNROLL
        for (int n_block = 0; n_block < keys.blocks; ++n_block) {
          const int key = keys.first + n_block * kN;
          std::uint64_t* barrier = shared.k_barriers.fill(at, [] { return sizeof(SharedStorage::k[0]); });
          load_tile<kN, kHeadDim, kColumns>(params.k, barrier, shared.k[at.stage], key, kv_head(tile), tile.batch);
          load_v();
          if (n_block == 0) load_q(tile);
          v_tile = tile;
          v_key = key;
          v_at = at;
          at.advance();
        }
      }
      load_v();
      Work end;
      end.keys.blocks = -1;
      hand_out(end);
    }
  };

  /// A thread of the consumer warpgroups; `thread` counts from the first of them.
  struct Consumer {
    ForwardParamsSm90 const& params;
    SharedStorage& shared;
    int thread;

    /// Computes tile after tile. Calls `finish(tile, accumulators, softmax state)`, or `skip(tile)` if it sees no key.
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

      typename Ring<2>::Cursor work_at{};
      typename Ring<kStagesQ>::Cursor q_at{};
      // Two cursors, though one follows the other: a step uses each and then advances it, so both stay uniform.
      typename Ring<kStages>::Cursor k_at{};  // the next block
      typename Ring<kStages>::Cursor v_at{};  // the block in hand
      const Turns<kWarpgroups> turns{warpgroup};
      const bool folded = folds(params.forward);
      const bool drops = kEveryOption && params.forward.dropout.active();
      Softmax softmax(folded ? params.forward.score_map.outer_log2 : 1.0f);
      TileCoord tile;
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
      const auto finish_work = [&] {
        shared.work_barriers.release_by_thread(work_at);
        work_at.advance();
      };
      // The next tile that sees a key; false if there is none.
      const auto next_tile = [&] {
        while (true) {
          shared.work_barriers.wait_full(work_at);
          Work const& work = shared.work[work_at.stage];
          blocks = work.keys.blocks;
          interior = work.keys.interior;
          if (blocks != 0) return blocks > 0;
          skip(work.tile);
          finish_work();
        }
      };
      // Scores to weights. Almost never do they outgrow the reference that the tile's first block has set.
      const auto weigh = [&](int n_block, auto first, auto interior_only) __attribute__((always_inline)) {
        constexpr bool kFirst = decltype(first)::value;
        Tensor scores = rows_and_columns(tSrS);  // (row, column)
        const bool edge = !interior.contains(n_block);
        if (!interior_only && (edge || !folded)) {
          Work const& work = shared.work[work_at.stage];
          const ScoreTile<ForwardParams> score_tile{params.forward, work.tile, work.tile.m_block * kM,
                                                    work.keys.lengths};
          if (!folded) score_tile.map(scores, tScS, n_block * kN);
          if (edge) score_tile.mask(scores, tScS, n_block * kN);
        }
        if (kFirst) softmax.begin(scores);
        float added[2];
        softmax.weigh(tSrS, tOrP, added);
        if (!kFirst && softmax.outgrown(added)) [[unlikely]] {
          float factor[2];
          softmax.raise(scores, factor);
          scale_rows(rows_and_columns(tOrO), factor);
          softmax.weigh(tSrS, tOrP, added);
        }
        softmax.row[0].sum += added[0];
        softmax.row[1].sum += added[1];
        if (drops) {
          Work const& work = shared.work[work_at.stage];
          KeptOf<decltype(tScS)>::template of<Rows::kQueries>(params.forward.dropout, work.tile.batch, work.tile.head,
                                                              tScS, work.tile.m_block * kM,
                                                              work.keys.first + n_block * kN)
              .keep_words(recast<std::uint32_t>(tOrP));
        }
      };

      if (!next_tile()) return;
      turns.begin();
      take_q();
      shared.k_barriers.wait_full(k_at);
      turns.await();
      start_scores(k_at.stage);
      turns.pass();
      wait_matmul<0>(tSrS);
      release_operands(0);
      weigh(0, true_type{}, false_type{});

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
        weigh(n_block, false_type{}, interior_only);
        opening = SM90::GMMA::ScaleOut::One;
      };
      while (true) {
        CUTE_NO_UNROLL
        for (int n_block = 1; n_block < blocks;) {
          if (kPeelInterior && folded && interior.contains(n_block)) {
            CUTE_NO_UNROLL
            do step(n_block, true_type{});
            while (++n_block < interior.end);
          } else {
            step(n_block++, false_type{});
          }
        }
        tile = shared.work[work_at.stage].tile;
        finish_work();
        if (!next_tile()) break;
        turns.await();
        start_output();
        take_q();
        shared.k_barriers.wait_full(k_at);
        start_scores(k_at.stage);
        turns.pass();
        wait_matmul<1>(tOrO);
        shared.v_barriers.release_by_warp(v_at);
        v_at.advance();
        finish(tile, tOrO, softmax);
        wait_matmul<0>(tSrS);
        release_operands(0);
        weigh(0, true_type{}, false_type{});
        opening = SM90::GMMA::ScaleOut::Zero;
      }
      start_output();
      wait_matmul<0>(tOrO);
      finish(tile, tOrO, softmax);
    }
  };
};

}  // namespace flashtile
