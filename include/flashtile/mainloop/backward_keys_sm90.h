// One block of 64 keys against all queries that see it, for wide heads: its dK and dV. The accumulator of either fills
// the registers of a warpgroup, so the two consumer warpgroups share the work by what they form instead of by rows:
// one the weights P and dV, the other dP and dK. The weights go from the first to the second through shared memory,
// each thread's to the thread with the same elements of the other.
//
// Tiles of scores are transposed, (keys, queries), so that weights and their gradients stay in registers as the A
// operand of dV and dK. A producer thread has TMA bring K and V, and tiles of Q and dO through a ring.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/barrier.h"
#include "flashtile/load/tma.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/key_block.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mainloop/wgmma.h"
#include "flashtile/math/round.h"
#include "flashtile/params.h"
#include "flashtile/variant.h"

namespace flashtile {

struct BackwardTwoPassParams {
  BackwardParams backward;
  CUtensorMap q, k, v, dout;  // tiles of 64 rows
  CUtensorMap statistics;     // lse_log2 and delta of 64 rows
  int key_blocks;             // thread blocks of the first pass
};

template <Variant kV, bool kRagged>
struct BackwardKeysSm90 {
  static constexpr int kM = 64;
  static constexpr int kN = 64;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kHeadDimV = kV.head_dim_v;
  static constexpr int kStages = kV.stages;
  static_assert(kStages == 2 && kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kV.tile_n == kN && kV.tile_m % kM == 0);

  using Element = std::conditional_t<kV.dtype == DType::kFloat16, cute::half_t, cute::bfloat16_t>;
  static constexpr int kColumns = 64;  // of one TMA box
  using One = cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>;
  static constexpr auto kMajorK = cute::SM90::GMMA::Major::K;
  static constexpr auto kMajorMN = cute::SM90::GMMA::Major::MN;
  using MmaS = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float,
                                       cute::Shape<cute::Int<kN>, cute::Int<kM>, cute::Int<kHeadDim>>>(),
      One{}));  // S, dP
  template <int kColumns>
  using MmaOf = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<
          Element, Element, float, cute::Shape<cute::Int<kN>, cute::Int<kColumns>, cute::Int<kM>>, kMajorK, kMajorMN>(),
      One{}));
  using MmaV = MmaOf<kHeadDimV>;
  using MmaK = MmaOf<kHeadDim>;
  static constexpr int kVectors = kM / 16;  // of 16 bytes: the weights of a thread

  struct SharedStorage {
    alignas(1024) Element k[kN * kHeadDim];
    alignas(1024) Element v[kN * kHeadDimV];
    alignas(1024) Element q[kStages][kM * kHeadDim];
    alignas(1024) Element dout[kStages][kM * kHeadDimV];
    alignas(128) uint4 weights[2][kVectors][128];
    alignas(128) float statistics[kStages][2][kM];  // lse_log2, delta
    Ring<1> k_barriers, v_barriers;
    Ring<kStages> q_barriers, dout_barriers;
    cutlass::arch::ClusterBarrier weights_full[2], weights_empty[2];

    /// By one thread, before any other touches the barriers.
    CUTE_DEVICE void init_barriers() {
      k_barriers.init(1);
      v_barriers.init(1);
      q_barriers.init(8);
      dout_barriers.init(8);
      CUTE_UNROLL
      for (int b = 0; b < 2; ++b) {
        weights_full[b].init(128);
        weights_empty[b].init(128);
      }
      cutlass::arch::fence_barrier_init();
    }
  };
  using Work = KeyBlock<kM, kN, kRagged>;

  struct Producer {
    BackwardTwoPassParams const& params;
    SharedStorage& shared;

    /// The workspace has larger tiles than kM.
    CUTE_DEVICE int first_row_of(Work const& work, int head) const {
      return int(work.workspace_tile(params.backward, head, 0) * kV.tile_m);
    }

    CUTE_DEVICE void run(Work const& work) {
      if (work.queries.visible.empty()) return;
      const TmaRows q_rows = work.q_rows(params.backward), k_rows = work.k_rows(params.backward);
      typename Ring<kStages>::Cursor at{};
      bool first = true;
      work.for_each([&](int head, int m_block) {
        if (first) {
          std::uint64_t* barrier = shared.k_barriers.fill({}, [] { return sizeof(SharedStorage::k); });
          load_tile<kN, kHeadDim, kColumns>(params.k, barrier, shared.k, k_rows, work.n_block * kN, work.kv_head);
        }
        std::uint64_t* barrier = shared.q_barriers.fill(
            at, [] { return sizeof(SharedStorage::q[0]) + sizeof(SharedStorage::statistics[0]); });
        load_tile<kM, kHeadDim, kColumns>(params.q, barrier, shared.q[at.stage], q_rows, m_block * kM, head);
        cute::SM90_TMA_LOAD_2D::copy(&params.statistics, barrier,
                                     static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     shared.statistics[at.stage], first_row_of(work, head) + m_block * kM, 0);
        if (first) {
          barrier = shared.v_barriers.fill({}, [] { return sizeof(SharedStorage::v); });
          load_tile<kN, kHeadDimV, kColumns>(params.v, barrier, shared.v, k_rows, work.n_block * kN, work.kv_head);
        }
        barrier = shared.dout_barriers.fill(at, [] { return sizeof(SharedStorage::dout[0]); });
        load_tile<kM, kHeadDimV, kColumns>(params.dout, barrier, shared.dout[at.stage], q_rows, m_block * kM, head);
        at.advance();
        first = false;
      });
    }
  };

  /// A thread of the warpgroup that forms weights and dV.
  struct Values {
    BackwardParams const& params;
    SharedStorage& shared;
    int thread;

    /// Accumulates dV, (mma, key, head_dim).
    template <class Accumulator>
    CUTE_DEVICE void run(Work const& work, Accumulator& tVrdV) const {
      using namespace cute;
      if (work.queries.visible.empty()) return;
      MmaS mma_s;
      MmaV mma_v;
      auto s_warpgroup = mma_s.get_slice(0);
      Tensor sK = make_tensor(make_smem_ptr(shared.k), SmemTile<Element, kN, kHeadDim, 1>{});
      Tensor sQ = make_tensor(make_smem_ptr(shared.q[0]), SmemTile<Element, kM, kHeadDim, kStages>{});
      Tensor sdOt = make_tensor(make_smem_ptr(shared.dout[0]), SmemTileT<Element, kM, kHeadDimV, kStages>{});
      Tensor tSrK = s_warpgroup.partition_fragment_A(sK)(_, _, _, 0);           // (mma, n, k)
      Tensor tSrQ = s_warpgroup.partition_fragment_B(sQ);                       // (mma, m, k, stage)
      Tensor tVrdO = mma_v.get_slice(thread).partition_fragment_B(sdOt);        // (mma, head_dim, k, stage)
      Tensor cS = make_identity_tensor(Shape<Int<kN>, Int<kM>>{});              // (N, M)
      Tensor tScS = rows_and_columns(mma_s.get_slice(thread).partition_C(cS));  // (row, column)
      Tensor tSrS = partition_fragment_C(mma_s, shape(cS));                     // (mma, n, m)
      Tensor scores = rows_and_columns(tSrS);                                   // (row, column)
      Tensor tVrP = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kM / 16>>>{});  // (mma, n, k)
      auto weights = recast<std::uint32_t>(tVrP);

      const int key = work.n_block * kN;
      const Lengths lengths = work.lengths(params);
      const bool folded = folds(params);
      const float scale_log2 = folded ? params.score_map.outer_log2 : 1.0f;
      typename Ring<kStages>::Cursor at{};
      typename Ring<2>::Cursor weights_at{};
      auto opening = SM90::GMMA::ScaleOut::Zero;

      shared.k_barriers.wait_full({});
      work.for_each([&](int head, int m_block) __attribute__((always_inline)) {
        const int stage = uniform(at.stage);
        shared.q_barriers.wait_full(at);
        start_matmul(mma_s, tSrK, tSrQ(_, _, _, stage), tSrS, SM90::GMMA::ScaleOut::Zero);
        wait_matmul<0>(tSrS);
        const bool edge = !work.queries.interior.contains(m_block);
        const ScoreTile<BackwardParams> score_tile{params, {work.batch, head, work.n_block}, key, lengths.transposed()};
        if (edge || !folded) {
          if (!folded) score_tile.map(scores, tScS, m_block * kM);
          if (edge) score_tile.mask(scores, tScS, m_block * kM);
        }
        const auto weigh = [&](auto&& slope) __attribute__((always_inline)) {
          for_column_pairs(tScS, shared.statistics[stage][0], [&](int c, float2 lse) {
            CUTE_UNROLL
            for (int r = 0; r < size<0>(scores); ++r)
              weights(c + r) =
                  round_pair<Element>(exp2_approx(fmaf(scores(r, c), scale_log2, -lse.x)) * slope(r, c),
                                      exp2_approx(fmaf(scores(r, c + 1), scale_log2, -lse.y)) * slope(r, c + 1));
          });
        };
        // dP is multiplied with the weights, under a cap with its slope too.
        const auto hand_over = [&] {
          CUTE_UNROLL
          for (int i = 0; i < kVectors; ++i)
            shared.weights[weights_at.stage][i][thread] = {weights(4 * i), weights(4 * i + 1), weights(4 * i + 2),
                                                           weights(4 * i + 3)};
          shared.weights_full[weights_at.stage].arrive();
          weights_at.advance();
        };
        // A new barrier counts as past its first round.
        shared.weights_empty[weights_at.stage].wait(weights_at.parity ^ 1);
        if (params.score_map.capped() || kV.every_option) [[unlikely]] {
          KeptOf<decltype(tScS)> kept;
          if constexpr (kV.every_option)
            kept = kept.template of<Rows::kKeys>(params.dropout, work.batch, head, tScS, key, m_block * kM);
          if (params.score_map.capped())
            weigh([&](int r, int c) { return score_tile.cap_slope(scores(r, c), tScS(r, c), m_block * kM); });
          else
            weigh([](int, int) { return 1.0f; });
          if constexpr (kV.every_option) kept.mark_words(weights);
          hand_over();
          weigh([](int, int) { return 1.0f; });
          if constexpr (kV.every_option) kept.keep_words(weights);
        } else {
          weigh([](int, int) { return 1.0f; });
          hand_over();
        }
        shared.q_barriers.release_by_warp(at);

        shared.dout_barriers.wait_full(at);
        start_matmul(mma_v, tVrP, tVrdO(_, _, _, stage), tVrdV, opening);
        wait_matmul<0>(tVrdV);
        shared.dout_barriers.release_by_warp(at);
        at.advance();
        opening = SM90::GMMA::ScaleOut::One;
      });
    }
  };

  /// A thread of the warpgroup that forms the gradients of the scores, and dK.
  struct Keys {
    BackwardParams const& params;
    SharedStorage& shared;
    int thread;

    /// Accumulates dK, before the scale, (mma, key, head_dim).
    template <class Accumulator>
    CUTE_DEVICE void run(Work const& work, Accumulator& tKrdK) const {
      using namespace cute;
      if (work.queries.visible.empty()) return;
      MmaS mma_s;
      MmaK mma_k;
      auto s_warpgroup = mma_s.get_slice(0);
      Tensor sV = make_tensor(make_smem_ptr(shared.v), SmemTile<Element, kN, kHeadDimV, 1>{});
      Tensor sdO = make_tensor(make_smem_ptr(shared.dout[0]), SmemTile<Element, kM, kHeadDimV, kStages>{});
      Tensor sQt = make_tensor(make_smem_ptr(shared.q[0]), SmemTileT<Element, kM, kHeadDim, kStages>{});
      Tensor tSrV = s_warpgroup.partition_fragment_A(sV)(_, _, _, 0);           // (mma, n, k)
      Tensor tSrdO = s_warpgroup.partition_fragment_B(sdO);                     // (mma, m, k, stage)
      Tensor tKrQ = mma_k.get_slice(thread).partition_fragment_B(sQt);          // (mma, head_dim, k, stage)
      Tensor cS = make_identity_tensor(Shape<Int<kN>, Int<kM>>{});              // (N, M)
      Tensor tScS = rows_and_columns(mma_s.get_slice(thread).partition_C(cS));  // (row, column)
      Tensor tSrdP = partition_fragment_C(mma_s, shape(cS));                    // (mma, n, m)
      Tensor dp = rows_and_columns(tSrdP);                                      // (row, column)
      Tensor tKrdS = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kM / 16>>>{});  // (mma, n, k)
      auto weights = recast<std::uint32_t>(tKrdS);
      typename Ring<kStages>::Cursor at{};
      typename Ring<2>::Cursor weights_at{};
      auto opening = SM90::GMMA::ScaleOut::Zero;

      shared.v_barriers.wait_full({});
      work.for_each([&](int, int) __attribute__((always_inline)) {
        const int stage = uniform(at.stage);
        shared.dout_barriers.wait_full(at);
        start_matmul(mma_s, tSrV, tSrdO(_, _, _, stage), tSrdP, SM90::GMMA::ScaleOut::Zero);
        shared.weights_full[weights_at.stage].wait(weights_at.parity);
        CUTE_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          const uint4 four = shared.weights[weights_at.stage][i][thread];
          weights(4 * i) = four.x, weights(4 * i + 1) = four.y, weights(4 * i + 2) = four.z,
                      weights(4 * i + 3) = four.w;
        }
        shared.weights_empty[weights_at.stage].arrive();
        weights_at.advance();
        shared.q_barriers.wait_full(at);  // for delta
        wait_matmul<0>(tSrdP);
        shared.dout_barriers.release_by_warp(at);
        if constexpr (kV.every_option) {
          CUTE_UNROLL
          for (int i = 0; i < size(tSrdP); ++i)
            tSrdP(i) = weights(i / 2) & (i % 2 ? 0x80000000 : 0x8000) ? 0.0f : params.dropout.scale * tSrdP(i);
          CUTE_UNROLL
          for (int i = 0; i < size(weights); ++i) weights(i) &= 0x7fff7fff;
        }
        for_column_pairs(tScS, shared.statistics[stage][1], [&](int c, float2 delta) {
          CUTE_UNROLL
          for (int r = 0; r < size<0>(dp); ++r) {
            const float low = float(tKrdS(2 * (c + r))), high = float(tKrdS(2 * (c + r) + 1));
            weights(c + r) = round_pair<Element>(low * (dp(r, c) - delta.x), high * (dp(r, c + 1) - delta.y));
          }
        });
        start_matmul(mma_k, tKrdS, tKrQ(_, _, _, stage), tKrdK, opening);
        wait_matmul<0>(tKrdK);
        shared.q_barriers.release_by_warp(at);
        at.advance();
        opening = SM90::GMMA::ScaleOut::One;
      });
    }
  };
};

}  // namespace flashtile
