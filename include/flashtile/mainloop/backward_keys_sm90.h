// This mainloop takes one block of 64 keys against all queries that see it, for wide heads: it forms dK and dV. The
// accumulator of either fills the registers of a warpgroup, so the two consumer warpgroups share the work by what they
// form instead of by rows: one forms the weights P and dV, the other dP and dK. The weights go from the first to the
// second through shared memory, from each thread to the one with the same elements. (Ampere's warps have these two
// roles as well.)
//
// Tiles of scores are transposed, (keys, queries), so that weights and their gradients stay in registers as the A
// operand of dV and dK. A producer warp has TMA load K and V, and tiles of Q and dO through a ring buffer.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/cuda/barrier.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/load/tma.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/key_block.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mainloop/wgmma.h"
#include "flashtile/math/element.h"
#include "flashtile/math/round.h"
#include "flashtile/params.h"
#include "flashtile/variant.h"

namespace flashtile {

struct BackwardTwoPassParams {
  BackwardParams backward;
  ScoreParams<NoPacking> scores_of_queries;  // backward.scores with rows and columns exchanged
  CUtensorMap q, k, v, dout;                 // tiles of 64 rows
  CUtensorMap statistics;                    // lse_log2 and delta of 64 rows
  int key_blocks, query_tiles;               // work of each pass; of a ragged batch, at most
  int heads_at_once;  // query heads of a dense batch whose tiles are interleaved: see BlockOfSection
};

/// This says of both passes whether they ask for tiles without a score near the softcap: see ScoreTile::cap().
template <Variant kV>
constexpr bool kAsksWhetherNear = kV.head_dim < 256;

template <Variant kV, bool kRagged, bool kMasked = false>
struct BackwardKeysSm90 {
  static constexpr int kM = 64;
  static constexpr int kN = 64;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kHeadDimV = kV.head_dim_v;
  static constexpr int kStages = kV.stages;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static_assert(kStages == 2 && kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kV.tile_n == kN && kV.tile_m % kM == 0);

  using Element = ElementOf<kV.dtype>;
  static constexpr int kColumns = 64;  // columns of one TMA box
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
  static constexpr int kStepsAhead = kStages + 2;  // iterations before a block's end when the next is asked for
  static constexpr int kVectors = kM / 16;         // vectors of 16 bytes that hold a thread's weights

  struct Tiles {
    alignas(1024) Element k[kN * kHeadDim];
    alignas(1024) Element v[kN * kHeadDimV];
    alignas(1024) Element q[kStages][kM * kHeadDim];
    alignas(1024) Element dout[kStages][kM * kHeadDimV];
    alignas(128) uint4 weights[2][kVectors][128];
    alignas(128) float statistics[kStages][2][kM];  // lse_log2, delta
  };
  // Consumers wait for tiles that the producer has TMA load, and the producer for them to be read: K by the warps that
  // form dV, V by those that form dK, Q and dO by both. The weights' barriers are between these two: dK's threads wait
  // for weights (full), dV's for their buffer to be read (empty).
  struct Barriers {
    Ring<1> k, v;
    Ring<kStages> q, dout;
    cutlass::arch::ClusterBarrier weights_full[2], weights_empty[2];

    /// One thread calls it before any other touches the barriers.
    CUTE_DEVICE void init() {
      k.init(4);
      v.init(4);
      q.init(8);
      dout.init(8);
      CUTE_UNROLL
      for (int b = 0; b < 2; ++b) {
        weights_full[b].init(128);
        weights_empty[b].init(128);
      }
    }
  };
  using Work = KeyBlock<kM, kN, kRagged, false, true, kMasked ? ColumnMasks::kAlways : ColumnMasks::kNever>;
  using Hidden = std::conditional_t<kMasked, HiddenQueries<2>, NothingHidden>;

  /// Returns where the rows of a tile of queries begin in the workspace, whose tiles may be larger than kM.
  CUTE_DEVICE static int workspace_row(BackwardParams const& params, Work const& work, int head, int m_block) {
    return work.workspace_tile(params, head, 0) * kV.tile_m + m_block * kM;
  }

  struct Producer {
    BackwardTwoPassParams const& params;
    Tiles& tiles;
    Barriers& barriers;
    typename Ring<kStages>::Cursor at{};
    typename Ring<1>::Cursor keys_at{};

    /// Loads the tiles of `work`. Calls `ask()` when it is time for the next block: early enough for its tiles to be in
    /// flight, and no earlier, as no other thread block can take it then.
    template <class Ask>
    CUTE_DEVICE void run(Work const& work, Ask&& ask) {
      int left = work.steps;
      if (left == 0) return ask();
      const int ask_at = min(left, kStepsAhead);
      const TmaRows q_rows = work.q_rows(params.backward), k_rows = work.k_rows(params.backward);
      bool first = true;
      const auto load_keys = [&](CUtensorMap const& map, Ring<1>& ring, auto& to) {
        constexpr int kColumnsOfTile = sizeof(to) / sizeof(Element) / kN;
        ring.fill_by_warp(keys_at, sizeof(to), [&](std::uint64_t* barrier) {
          load_tile<kN, kColumnsOfTile, kColumns>(map, barrier, &to[0], k_rows, work.n_block * kN, work.kv_head);
        });
      };
      work.for_each_tile(params.backward, [&](int head, int m_block, bool) {
        const auto load_queries = [&](CUtensorMap const& map, std::uint64_t* barrier, auto& to) {
          constexpr int kColumnsOfTile = sizeof(to) / sizeof(Element) / kM;
          load_tile<kM, kColumnsOfTile, kColumns>(map, barrier, &to[0], q_rows, m_block * kM, head);
        };
        std::uint64_t* of_q = nullptr;  // the barrier of Q and the statistics
        barriers.q.fill_by_warp(at, sizeof(Tiles::q[0]) + sizeof(Tiles::statistics[0]), [&](std::uint64_t* barrier) {
          load_queries(params.q, barrier, tiles.q[at.stage]);
          of_q = barrier;
        });
        if (first) load_keys(params.k, barriers.k, tiles.k);  // waits until the last block's K has been read
        barriers.dout.fill_by_warp(at, sizeof(Tiles::dout[0]), [&](std::uint64_t* barrier) {
          load_queries(params.dout, barrier, tiles.dout[at.stage]);
        });
        if (first) {
          load_keys(params.v, barriers.v, tiles.v);
          await_kernel_before();  // which writes the statistics
        }
        if (of_q)
          cute::SM90_TMA_LOAD_2D::copy(
              &params.statistics, of_q, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
              tiles.statistics[at.stage], workspace_row(params.backward, work, head, m_block), 0);
        at.advance();
        first = false;
        if (left-- == ask_at) ask();
        __syncwarp();  // a lane that fell two phases behind would misread the barrier's parity
      });
      keys_at.advance();
    }
  };

  /// Values is a thread of the warpgroup that forms weights and dV.
  struct Values {
    BackwardParams const& params;
    Tiles& tiles;
    Barriers& barriers;
    int thread;
    const bool steep = params.steep();
    typename Ring<kStages>::Cursor at{};
    typename Ring<1>::Cursor keys_at{};
    typename Ring<2>::Cursor weights_at{};

    /// Rounds the weights that scores, (row, column), have, times `slope(row, column)`. With kDropsMarked, those that
    /// are marked in what `weights` had before become 0.
    template <bool kDropsMarked = false, class Scores, class Coord, class Weights, class Slope>
    CUTE_DEVICE void weigh(Scores& scores, Coord const& tScS, Weights& weights, int stage, Slope&& slope) const {
      using namespace cute;
      const float unit_log2 = params.scores.map.unit_log2;
      for_column_pairs(tScS, tiles.statistics[stage][0], [&](int c, float2 lse) {
        CUTE_UNROLL
        for (int r = 0; r < size<0>(scores); ++r) {
          const std::uint32_t pair =
              round_pair<Element>(exp2_approx(fmaf(scores(r, c), unit_log2, -lse.x)) * slope(r, c),
                                  exp2_approx(fmaf(scores(r, c + 1), unit_log2, -lse.y)) * slope(r, c + 1));
          weights(c + r) = kDropsMarked ? drop_marked(pair, weights(c + r)) : pair;
        }
      });
    }

    /// Gives the weights to the other warpgroup, which multiplies dP with them.
    template <class Weights>
    CUTE_DEVICE void hand_over(Weights const& weights) {
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i)
        tiles.weights[weights_at.stage][i][thread] = {weights(4 * i), weights(4 * i + 1), weights(4 * i + 2),
                                                      weights(4 * i + 3)};
      barriers.weights_full[weights_at.stage].arrive();
      weights_at.advance();
    }

    /// Accumulates dV (mma, key, head_dim).
    template <class Accumulator>
    CUTE_DEVICE void run(Work const& work, Accumulator& tVrdV) {
      using namespace cute;
      if (work.empty()) return;
      MmaS mma_s;
      MmaV mma_v;
      auto s_warpgroup = mma_s.get_slice(0);
      Tensor sK = make_tensor(make_smem_ptr(tiles.k), SmemTile<Element, kN, kHeadDim, 1>{});
      Tensor sQ = make_tensor(make_smem_ptr(tiles.q[0]), SmemTile<Element, kM, kHeadDim, kStages>{});
      Tensor sdOt = make_tensor(make_smem_ptr(tiles.dout[0]), SmemTileT<Element, kM, kHeadDimV, kStages>{});
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
      const bool maps = params.scores.map.maps(), capped = params.scores.map.capped;
      auto opening = SM90::GMMA::ScaleOut::Zero;

      barriers.k.wait_full(keys_at);
      work.for_each_tile(params, [&](int head, int m_block, bool edge) __attribute__((always_inline)) {
        const int stage = uniform(at.stage);
        barriers.q.wait_full(at);
        start_matmul(mma_s, tSrK, tSrQ(_, _, _, stage), tSrS, SM90::GMMA::ScaleOut::Zero);
        // Waits until dK's warpgroup has read the weights that were in this buffer; on a new barrier nobody waits.
        barriers.weights_empty[weights_at.stage].wait(weights_at.parity ^ 1);
        Hidden hidden;
        if constexpr (kMasked) {
          if (edge)
            hidden.find(tScS, params.columns.of_head(work.batch, head, work.span_of_keys(params)) + key,
                        lengths.k - key, m_block * kM);
        }
        wait_matmul<0>(tSrS);
        // Rows of keys behind the last one need no mask here: what they accumulate is never stored.
        const ScoreTile<NoPacking> score_tile{
            params.scores, {work.batch, head, work.n_block}, key, lengths.transposed()};
        if (edge || maps || steep) {
          if (maps) score_tile.template cap_or_stretch<kAsksWhetherNear<kV>>(scores, tScS, m_block * kM);
          if (edge) score_tile.mask(scores, tScS, m_block * kM);
          if constexpr (kMasked) {
            if (edge) hidden.hide(scores);
          }
          if (steep)
            relate_steep_rows(params, scores, tScS, tiles.statistics[stage][0],
                              workspace_row(params, work, head, m_block));
        }
        const auto one = [](int, int) { return 1.0f; };
        if (capped || kKnowsDropout) [[unlikely]] {  // those handed over have the softcap's slope as a factor
          if (capped)
            weigh(scores, tScS, weights, stage, [&](int r, int c) { return score_tile.cap_slope(scores(r, c)); });
          else
            weigh(scores, tScS, weights, stage, one);
          if constexpr (kKnowsDropout)
            DropoutTile<Rows::kKeys>(params.dropout, work.batch, head, key, m_block * kM)
                .for_each(tScS, [&](int, int c, auto kept) { kept.mark_words(weights, c); });
          hand_over(weights);
          if (capped || !kKnowsDropout) {
            weigh<kKnowsDropout>(scores, tScS, weights, stage, one);
          } else {
            CUTE_UNROLL
            for (int i = 0; i < size(weights); ++i) weights(i) = drop_marked(weights(i), weights(i));
          }
        } else {
          weigh(scores, tScS, weights, stage, one);
          hand_over(weights);
        }
        barriers.q.release_by_warp(at);

        barriers.dout.wait_full(at);
        start_matmul(mma_v, tVrP, tVrdO(_, _, _, stage), tVrdV, opening);
        wait_matmul<0>(tVrdV);
        barriers.dout.release_by_warp(at);
        at.advance();
        opening = SM90::GMMA::ScaleOut::One;
      });
      barriers.k.release_by_warp(keys_at);
      keys_at.advance();
    }
  };

  /// Keys is a thread of the warpgroup that forms the gradients of the scores, and dK.
  struct Keys {
    BackwardParams const& params;
    Tiles& tiles;
    Barriers& barriers;
    int thread;
    typename Ring<kStages>::Cursor at{};
    typename Ring<1>::Cursor keys_at{};
    typename Ring<2>::Cursor weights_at{};

    /// Accumulates dK, before the scale (mma, key, head_dim).
    template <class Accumulator>
    CUTE_DEVICE void run(Work const& work, Accumulator& tKrdK) {
      using namespace cute;
      if (work.empty()) return;
      MmaS mma_s;
      MmaK mma_k;
      auto s_warpgroup = mma_s.get_slice(0);
      Tensor sV = make_tensor(make_smem_ptr(tiles.v), SmemTile<Element, kN, kHeadDimV, 1>{});
      Tensor sdO = make_tensor(make_smem_ptr(tiles.dout[0]), SmemTile<Element, kM, kHeadDimV, kStages>{});
      Tensor sQt = make_tensor(make_smem_ptr(tiles.q[0]), SmemTileT<Element, kM, kHeadDim, kStages>{});
      Tensor tSrV = s_warpgroup.partition_fragment_A(sV)(_, _, _, 0);           // (mma, n, k)
      Tensor tSrdO = s_warpgroup.partition_fragment_B(sdO);                     // (mma, m, k, stage)
      Tensor tKrQ = mma_k.get_slice(thread).partition_fragment_B(sQt);          // (mma, head_dim, k, stage)
      Tensor cS = make_identity_tensor(Shape<Int<kN>, Int<kM>>{});              // (N, M)
      Tensor tScS = rows_and_columns(mma_s.get_slice(thread).partition_C(cS));  // (row, column)
      Tensor tSrdP = partition_fragment_C(mma_s, shape(cS));                    // (mma, n, m)
      Tensor dp = rows_and_columns(tSrdP);                                      // (row, column)
      Tensor tKrdS = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kM / 16>>>{});  // (mma, n, k)
      auto weights = recast<std::uint32_t>(tKrdS);
      auto opening = SM90::GMMA::ScaleOut::Zero;

      barriers.v.wait_full(keys_at);
      work.for_each([&](int, int) __attribute__((always_inline)) {
        const int stage = uniform(at.stage);
        barriers.dout.wait_full(at);
        start_matmul(mma_s, tSrV, tSrdO(_, _, _, stage), tSrdP, SM90::GMMA::ScaleOut::Zero);
        barriers.weights_full[weights_at.stage].wait(weights_at.parity);
        CUTE_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          const uint4 four = tiles.weights[weights_at.stage][i][thread];
          weights(4 * i) = four.x, weights(4 * i + 1) = four.y, weights(4 * i + 2) = four.z,
                      weights(4 * i + 3) = four.w;
        }
        barriers.weights_empty[weights_at.stage].arrive();
        weights_at.advance();
        barriers.q.wait_full(at);  // delta comes with Q
        wait_matmul<0>(tSrdP);
        barriers.dout.release_by_warp(at);
        if constexpr (kKnowsDropout) {
          CUTE_UNROLL
          for (int i = 0; i < size(weights); ++i) {
            tSrdP(2 * i) = keep_unmarked<0>(tSrdP(2 * i), weights(i));
            tSrdP(2 * i + 1) = keep_unmarked<1>(tSrdP(2 * i + 1), weights(i));
            weights(i) &= 0x7fff7fff;
          }
        }
        for_column_pairs(tScS, tiles.statistics[stage][1], [&](int c, float2 delta) {
          CUTE_UNROLL
          for (int r = 0; r < size<0>(dp); ++r) {
            const float low = float(tKrdS(2 * (c + r))), high = float(tKrdS(2 * (c + r) + 1));
            if constexpr (kKnowsDropout) {
              const float scale = params.dropout.scale;  // of the weights that stay
              weights(c + r) = round_pair<Element>(low * fmaf(scale, dp(r, c), -delta.x),
                                                   high * fmaf(scale, dp(r, c + 1), -delta.y));
            } else {
              weights(c + r) = round_pair<Element>(low * (dp(r, c) - delta.x), high * (dp(r, c + 1) - delta.y));
            }
          }
        });
        start_matmul(mma_k, tKrdS, tKrQ(_, _, _, stage), tKrdK, opening);
        wait_matmul<0>(tKrdK);
        barriers.q.release_by_warp(at);
        at.advance();
        opening = SM90::GMMA::ScaleOut::One;
      });
      barriers.v.release_by_warp(keys_at);
      keys_at.advance();
    }
  };
};

}  // namespace flashtile
