// This mainloop takes one tile of 128 queries against all keys they see, for wide heads: it forms dQ. As in the
// forward, each of two consumer warpgroups owns 64 whole rows, and the gradients of its scores stay in registers as the
// A operand of dQ. A producer warp has TMA load Q and dO, and blocks of K and V one after the other.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/backward_keys_sm90.h"
#include "flashtile/math/online_softmax.h"

namespace flashtile {

template <Variant kV, bool kRagged, bool kMasked = false>
struct BackwardQueriesSm90 {
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kHeadDimV = kV.head_dim_v;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr int kStages = 2;  // stages of K, which is read longer than V
  static constexpr int kWarpgroups = 2;
  static constexpr int kStepsAhead = kStages + 1;  // iterations before a tile's end when the next is asked for
  static constexpr int kRowsPerBox = 64;
  static_assert(kM == 64 * kWarpgroups && kN == kRowsPerBox);

  using Element = typename BackwardKeysSm90<kV, kRagged>::Element;
  static constexpr int kColumns = 64;  // columns of one TMA box
  using Warpgroups = cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>;
  using MmaS = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float,
                                       cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kHeadDim>>>(),
      Warpgroups{}));  // S, dP
  using MmaQ = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<Element, Element, float,
                                       cute::Shape<cute::Int<kM>, cute::Int<kHeadDim>, cute::Int<kN>>,
                                       cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>(),
      Warpgroups{}));

  struct Tiles {
    alignas(1024) Element q[kM * kHeadDim];
    alignas(1024) Element dout[kM * kHeadDimV];
    alignas(1024) Element k[kStages][kN * kHeadDim];
    alignas(1024) Element v[kN * kHeadDimV];
  };
  // Both warpgroups wait for tiles that the producer has TMA load; it waits for all their warps to have read a stage.
  struct Barriers {
    Ring<1> q, dout, v;
    Ring<kStages> k;

    /// One thread calls it before any other touches the barriers.
    CUTE_DEVICE void init() {
      q.init(4 * kWarpgroups);
      dout.init(4 * kWarpgroups);
      k.init(4 * kWarpgroups);
      v.init(4 * kWarpgroups);
    }
  };

  /// Work is a tile of queries, and the blocks of keys that it sees, or under a column mask the steps that visit these.
  struct Work {
    BackwardParams::QueryTile tile;
    BlockWalk keys;
    struct NoBlocks {};
    [[no_unique_address]] std::conditional_t<kMasked, MaskedBlocks, NoBlocks> blocks;

    CUTE_DEVICE Work(BackwardParams const& params, BackwardParams::QueryTile const& tile) : tile(tile) {
      if constexpr (kMasked) {
        MaskWords const& all = params.mask_tables.queries;
        blocks.words = all.of_tile(params.sequences.q, tile.batch, tile.sequence.q.first,
                                   params.columns.mask_of(tile.head), tile.m_block);
        keys = all.steps(blocks.words);
      } else {
        keys = tile.keys(params, kM, kN);
      }
    }
    /// Returns the block that is visited in a step, for which it is asked once.
    CUTE_DEVICE int block_of(BackwardParams const& params, int step) {
      if constexpr (kMasked)
        return blocks.next(params.mask_tables.queries.words);
      else
        return step;
    }

    CUTE_DEVICE TileCoord coord() const { return {tile.batch, tile.head, tile.m_block}; }
    CUTE_DEVICE Lengths lengths(BackwardParams const& params) const {
      return kRagged ? tile.sequence.lengths() : params.lengths;
    }
    CUTE_DEVICE TmaRows rows(Spans const& spans, Span span) const {
      return kRagged ? TmaRows::of(spans, tile.batch, span, span.used) : TmaRows::dense(tile.batch);
    }
  };

  struct Producer {
    BackwardTwoPassParams const& params;
    Tiles& tiles;
    Barriers& barriers;
    typename Ring<kStages>::Cursor k_at{};
    typename Ring<1>::Cursor v_at{}, queries_at{};

    /// Loads the tiles of `work`. Calls `ask()` when it is time for the next tile.
    template <class Ask>
    CUTE_DEVICE void run(Work work, Ask&& ask) {
      BlockWalk const& walk = work.keys;
      if (walk.empty()) return ask();
      BackwardParams const& backward = params.backward;
      const TmaRows q_rows = work.rows(backward.sequences.q, work.tile.sequence.q);
      const TmaRows k_rows = work.rows(backward.sequences.k, work.tile.sequence.k);
      const int kv_head = work.tile.head / backward.group;
      const auto load_keys = [&](int n_block) {
        barriers.k.fill_by_warp(k_at, sizeof(Tiles::k[0]), [&](std::uint64_t* barrier) {
          load_tile<kN, kHeadDim, kColumns>(params.k, barrier, tiles.k[k_at.stage], k_rows, n_block * kN, kv_head);
        });
        k_at.advance();
      };
      const auto load_queries = [&](CUtensorMap const& map, Ring<1>& ring, auto& to) {
        constexpr int kColumnsOfTile = sizeof(to) / sizeof(Element) / kM;
        ring.fill_by_warp(queries_at, sizeof(to), [&](std::uint64_t* barrier) {
          CUTE_UNROLL
          for (int row = 0; row < kM; row += kRowsPerBox)
            load_tile<kM, kColumnsOfTile, kColumns>(map, barrier, to + row * kColumns, q_rows,
                                                    work.tile.m_block * kM + row, work.tile.head);
        });
      };
      int k_block = work.block_of(backward, walk.first());
      load_keys(k_block);
      load_queries(params.q, barriers.q, tiles.q);
      load_queries(params.dout, barriers.dout, tiles.dout);
      queries_at.advance();
      const int ask_at = max(walk.end() - kStepsAhead, walk.first());
      CUTE_NO_UNROLL
      for (int step = walk.first(); step < walk.end(); step = walk.next(step)) {
        barriers.v.fill_by_warp(v_at, sizeof(Tiles::v), [&](std::uint64_t* barrier) {
          load_tile<kN, kHeadDimV, kColumns>(params.v, barrier, tiles.v, k_rows, k_block * kN, kv_head);
        });
        v_at.advance();
        if (walk.next(step) < walk.end()) {
          k_block = work.block_of(backward, walk.next(step));
          load_keys(k_block);
        }
        if (step == ask_at) ask();
        __syncwarp();  // a lane that fell two phases behind would misread the barrier's parity
      }
    }
  };

  /// Consumer is a thread of the consumer warpgroups; `thread` counts from the first of them.
  struct Consumer {
    BackwardParams const& params;
    ScoreParams<NoPacking> const& score_params;  // where rows are queries
    Tiles& tiles;
    Barriers& barriers;
    int thread;
    typename Ring<kStages>::Cursor k_at{};
    typename Ring<1>::Cursor v_at{}, queries_at{};

    /// These are the workspace's numbers of a thread's two rows.
    struct OwnRows {
      float lse_log2[2], delta[2];
      bool steep = false;  // whether any row of the warp is
    };
    template <class Coord>
    CUTE_DEVICE OwnRows rows_of(Work const& work, Coord const& tScS) const {
      using namespace cute;
      OwnRows rows;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const std::int64_t row = work.tile.place * kM + get<0>(tScS(r, 0));
        rows.lse_log2[r] = params.workspace.lse_log2(params.memory)[row];
        rows.delta[r] = params.workspace.delta(params.memory)[row];
        rows.steep |= BackwardWorkspace::says_steep(rows.lse_log2[r]);
      }
      rows.steep = __any_sync(0xffffffff, rows.steep);
      return rows;
    }

    /// Subtracts from the scores of steep rows what their weights are relative to.
    template <class Scores, class Coord>
    CUTE_DEVICE void relate(Scores& scores, OwnRows const& rows, Work const& work, Coord const& tScS) const {
      using namespace cute;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (!BackwardWorkspace::says_steep(rows.lse_log2[r])) continue;
        const std::int64_t row = work.tile.place * kM + get<0>(tScS(r, 0));
        relate_steep_row(scores(r, _), params.workspace.steep_rows(params.memory)[row]);
      }
    }

    /// Turns scores into weights times `slope(row, column)`.
    template <class Scores, class Slope>
    CUTE_DEVICE void weigh(Scores& scores, OwnRows const& rows, float unit_log2, Slope&& slope) const {
      using namespace cute;
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        CUTE_UNROLL
        for (int c = 0; c < size<1>(scores); ++c)
          scores(r, c) = exp2_approx(fmaf(scores(r, c), unit_log2, -rows.lse_log2[r])) * slope(r, c);
      }
    }

    /// Accumulates dQ, before the scale (mma, query, head_dim).
    template <class Accumulator>
    CUTE_DEVICE void run(Work work, Accumulator& tQrdQ) {
      using namespace cute;
      BlockWalk const& walk = work.keys;
      if (walk.empty()) return;
      MmaS mma_s;
      MmaQ mma_q;
      auto s_warpgroup = mma_s.get_slice(uniform(thread / 128) * 128);
      Tensor sQ = make_tensor(make_smem_ptr(tiles.q), SmemTile<Element, kM, kHeadDim, 1>{});
      Tensor sdO = make_tensor(make_smem_ptr(tiles.dout), SmemTile<Element, kM, kHeadDimV, 1>{});
      Tensor sK = make_tensor(make_smem_ptr(tiles.k[0]), SmemTile<Element, kN, kHeadDim, kStages>{});
      Tensor sV = make_tensor(make_smem_ptr(tiles.v), SmemTile<Element, kN, kHeadDimV, 1>{});
      Tensor sKt = make_tensor(make_smem_ptr(tiles.k[0]), SmemTileT<Element, kN, kHeadDim, kStages>{});
      Tensor tSrQ = s_warpgroup.partition_fragment_A(sQ)(_, _, _, 0);           // (mma, m, k)
      Tensor tSrdO = s_warpgroup.partition_fragment_A(sdO)(_, _, _, 0);         // (mma, m, k)
      Tensor tSrK = s_warpgroup.partition_fragment_B(sK);                       // (mma, n, k, stage)
      Tensor tSrV = s_warpgroup.partition_fragment_B(sV)(_, _, _, 0);           // (mma, n, k)
      Tensor tQrK = mma_q.get_slice(thread).partition_fragment_B(sKt);          // (mma, head_dim, k, stage)
      Tensor cS = make_identity_tensor(Shape<Int<kM>, Int<kN>>{});              // (M, N)
      Tensor tScS = rows_and_columns(mma_s.get_slice(thread).partition_C(cS));  // (row, column)
      Tensor tSrS = partition_fragment_C(mma_s, shape(cS));                     // (mma, m, n)
      Tensor tSrdP = partition_fragment_C(mma_s, shape(cS));                    // (mma, m, n)
      Tensor scores = rows_and_columns(tSrS);                                   // (row, column)
      Tensor dp = rows_and_columns(tSrdP);                                      // (row, column)
      Tensor tQrdS = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kN / 16>>>{});  // (mma, m, k)

      const bool maps = params.scores.map.maps();
      const float unit_log2 = params.scores.map.unit_log2;
      const int first_row = work.tile.m_block * kM;
      const ScoreTile<NoPacking> score_tile{score_params, work.coord(), first_row, work.lengths(params)};
      const OwnRows rows = rows_of(work, tScS);
      auto opening = SM90::GMMA::ScaleOut::Zero;

      barriers.q.wait_full(queries_at);
      CUTE_NO_UNROLL
      for (int step = walk.first(); step < walk.end(); step = walk.next(step)) {
        const int n_block = work.block_of(params, step);
        const int stage = uniform(k_at.stage);
        barriers.k.wait_full(k_at);
        start_matmul(mma_s, tSrQ, tSrK(_, _, _, stage), tSrS, SM90::GMMA::ScaleOut::Zero);
        if (step == walk.first()) barriers.dout.wait_full(queries_at);
        barriers.v.wait_full(v_at);
        start_matmul(mma_s, tSrdO, tSrV, tSrdP, SM90::GMMA::ScaleOut::Zero);
        const bool edge = walk.is_edge(step);
        wait_matmul<1>(tSrS);
        if (edge || maps) {
          if (maps) score_tile.template cap_or_stretch<kAsksWhetherNear<kV>>(scores, tScS, n_block * kN);
          if (edge) score_tile.mask(scores, tScS, n_block * kN);
          if constexpr (kMasked) {
            if (edge) {
              HiddenBits<kN> hidden;
              hidden.find(params.columns.of_head(work.tile.batch, work.tile.head, work.tile.sequence.k) + n_block * kN,
                          work.lengths(params).k - n_block * kN, first_row + get<0>(tScS(0, 0)) - thread % 32 / 4);
              hidden.hide(scores);
            }
          }
        }
        if (rows.steep) [[unlikely]]
          relate(scores, rows, work, tScS);
        if (params.scores.map.capped) [[unlikely]]
          weigh(scores, rows, unit_log2, [&](int r, int c) { return score_tile.cap_slope(scores(r, c)); });
        else
          weigh(scores, rows, unit_log2, [](int, int) { return 1.0f; });
        wait_matmul<0>(tSrdP);
        barriers.v.release_by_warp(v_at);
        v_at.advance();
        if (step == walk.last()) {
          barriers.q.release_by_warp(queries_at);
          barriers.dout.release_by_warp(queries_at);
        }
        if constexpr (kKnowsDropout)
          DropoutTile<Rows::kQueries>(params.dropout, work.tile.batch, work.tile.head, first_row, n_block * kN)
              .for_each(tScS, [&](int r, int c, auto kept) { kept.keep(dp, r, c); });
        CUTE_UNROLL
        for (int r = 0; r < size<0>(scores); ++r) {
          CUTE_UNROLL
          for (int c = 0; c < size<1>(scores); ++c) {
            if constexpr (kKnowsDropout)
              scores(r, c) *= fmaf(params.dropout.scale, dp(r, c), -rows.delta[r]);
            else
              scores(r, c) *= dp(r, c) - rows.delta[r];
          }
        }
        round_to(tSrS, tQrdS);
        start_matmul(mma_q, tQrdS, tQrK(_, _, _, stage), tQrdQ, opening);
        wait_matmul<0>(tQrdQ);
        barriers.k.release_by_warp(k_at);
        k_at.advance();
        opening = SM90::GMMA::ScaleOut::One;
      }
      queries_at.advance();
    }
  };
};

}  // namespace flashtile
