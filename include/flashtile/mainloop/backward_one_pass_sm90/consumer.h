// This file has the consumer warpgroups of Hopper's backward kernel of one pass, which multiply and form weights.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/launch.h"
#include "flashtile/mainloop/backward_one_pass_sm90/scheduler.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/math/round.h"

namespace flashtile {

/// These functions make what one thread of the consumers holds of each operand: registers, or descriptors of shared
/// memory, which are those of its warpgroup.
template <class Mainloop>
struct OnePassFragmentsSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;
  using Element = typename Mainloop::Element;
  using MmaS = typename Mainloop::MmaS;
  using MmaKV = typename Mainloop::MmaKV;
  using MmaQ = typename Mainloop::MmaQ;
  static constexpr int kM = Mainloop::kM;
  static constexpr int kN = Mainloop::kN;
  static constexpr int kHeadDim = Mainloop::kHeadDim;
  static constexpr int kStages = Mainloop::kStages;
  using ShapeS = cute::Shape<cute::Int<kN>, cute::Int<kM>>;
  using TilesOfQueries = SmemTile<Element, kM, kHeadDim, kStages>;
  using TileOfValues = SmemTile<Element, kN, kHeadDim, 1>;
  using TilesOfQueriesT = SmemTileT<Element, kM, kHeadDim, kStages>;

  template <class Layout>
  CUTE_DEVICE static auto tensor(Element* at, Layout layout) {
    return cute::make_tensor(cute::make_smem_ptr(at), layout);
  }
  /// Returns K or V, (mma, n, k).
  template <int kColumnsPerBox>
  CUTE_DEVICE static auto keys(Element* at, int warpgroup) {
    using namespace cute;
    using TileOfKeys = SmemTile<Element, kN, kHeadDim, 1, kColumnsPerBox>;
    return MmaS{}.get_slice(warpgroup * 128).partition_fragment_A(tensor(at, TileOfKeys{}))(_, _, _, 0);
  }
  /// Returns V, in registers or in shared memory, (mma, n, k).
  CUTE_DEVICE static auto values(Element* at, int thread) {
    using namespace cute;
    if constexpr (Mainloop::kKeepsV)
      return typename Mainloop::MmaP{}.get_slice(thread).partition_fragment_A(tensor(at, TileOfValues{})(_, _, 0));
    else
      return keys<Mainloop::kColumns>(at, uniform(thread / 128));
  }
  /// Loads V into registers.
  template <class Values>
  CUTE_DEVICE static void load_values(Element* at, int thread, Values& tSrV) {
    using namespace cute;
    auto load = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, typename Mainloop::MmaP{}).get_slice(thread);
    copy(Copy_Atom<SM75_U32x4_LDSM_N, Element>{},
         load.partition_S(as_position_independent_swizzle_tensor(tensor(at, TileOfValues{})(_, _, 0))),
         load.retile_D(tSrV));
  }
  /// Returns Q or dO for the scores, (mma, m, k, stage).
  CUTE_DEVICE static auto queries(Element* at, int warpgroup) {
    return MmaS{}.get_slice(warpgroup * 128).partition_fragment_B(tensor(at, TilesOfQueries{}));
  }
  /// Returns Q or dO for dK and dV, (mma, head_dim, k, stage).
  CUTE_DEVICE static auto queries_t(Element* at, int thread) {
    return MmaKV{}.get_slice(thread).partition_fragment_B(tensor(at, TilesOfQueriesT{}));
  }
  /// Returns the coordinates of each score in the tile.
  CUTE_DEVICE static auto places(int thread) {
    return rows_and_columns(MmaS{}.get_slice(thread).partition_C(cute::make_identity_tensor(ShapeS{})));
  }
  CUTE_DEVICE static auto scores() { return cute::partition_fragment_C(MmaS{}, ShapeS{}); }  // (mma, n, m)
  CUTE_DEVICE static auto rounded() {
    using namespace cute;
    return make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kM / 16>>>{});  // (mma, n, k)
  }
  CUTE_DEVICE static auto gradient_of_keys() {
    using namespace cute;
    return partition_fragment_C(MmaKV{}, Shape<Int<kN>, Int<kHeadDim>>{});  // (mma, key, head_dim)
  }
  CUTE_DEVICE static auto gradient_of_queries() {
    return cute::partition_fragment_C(MmaQ{}, cute::take<0, 2>(typename Mainloop::ShapeQ{}));
  }
};

/// OnePassConsumerSm90 is one thread of the consumers; `thread` counts from the first of them.
template <class Mainloop>
class OnePassConsumerSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;
  using Element = typename Mainloop::Element;
  using Work = typename Mainloop::Work;
  using Blocks = OnePassBlocksSm90<Mainloop>;
  using Fragments = OnePassFragmentsSm90<Mainloop>;
  using ScaleOut = cute::SM90::GMMA::ScaleOut;
  using Tile = ScoreTile<NoPacking>;
  using Hidden = std::conditional_t<Mainloop::kMasked, HiddenQueries<2>, NothingHidden>;
  static constexpr int kM = Mainloop::kM;
  static constexpr int kN = Mainloop::kN;
  static constexpr bool kLoops = Mainloop::kLoops;
  static constexpr bool kKnowsDropout = Mainloop::kKnowsDropout;
  static constexpr bool kKnowsSoftcap = Mainloop::kKnowsSoftcap;

 public:
  CUTE_DEVICE OnePassConsumerSm90(BackwardOnePassParams const& params, SharedStorage& shared, int thread)
      : backward(params.backward), shared(shared), thread(thread) {}

  /// Calls `finish(work, tKrdK, tVrdV)` for each block, with dK, before the scale, and dV, both (mma, key, head_dim).
  /// Where dQ is whole, calls `stage_dq(tQrdQ, staging)` for this warpgroup's part of it, before the scale, in each
  /// step, to put it where the writer takes it.
  template <class Finish, class StageDq>
  CUTE_DEVICE void run(Blocks const& blocks, Finish&& finish, StageDq&& stage_dq) {
    if constexpr (kLoops) ask_for_steep_rows();
    blocks.for_each([&](Work work, auto release) __attribute__((always_inline)) {
      release();
      auto tKrdK = Fragments::gradient_of_keys();
      auto tVrdV = Fragments::gradient_of_keys();
      if (work.empty()) {  // with one call of finish() the accumulators would be copied
        cute::clear(tKrdK);
        cute::clear(tVrdV);
        return finish(work, tKrdK, tVrdV);
      }
      add_up(work, tKrdK, tVrdV, stage_dq);
      finish(work, tKrdK, tVrdV);
    });
  }

 private:
  /// Asks, once, whether there are steep rows, which the kernel before marks. A thread block that takes only one block
  /// of keys does not wait for that kernel before its first S is being formed.
  CUTE_DEVICE void ask_for_steep_rows() {
    await_kernel_before();
    steep = backward.steep();
  }

  /// Forms dK and dV of a block of keys, and its part of dQ of all tiles of queries that see it.
  template <class Gradient, class StageDq>
  CUTE_DEVICE void add_up(Work const& work, Gradient& tKrdK, Gradient& tVrdV, StageDq const& stage_dq) {
    lengths = work.lengths(backward);
    partial = (work.n_block + 1) * kN > lengths.k;
    started = false;
    opening = ScaleOut::Zero;
    shared.k_barriers.wait_full(keys_at);
    work.for_each([&](int head, int index)
                      __attribute__((always_inline)) { step(work, head, index, tKrdK, tVrdV, stage_dq); });
    shared.ds_full[dq_at.stage].wait(dq_at.parity);
    if (kLoops && !Mainloop::kKeepsV) shared.v_barriers.release_by_warp(keys_at);
    auto tQrdQ = Fragments::gradient_of_queries();
    start_dq(tQrdQ);
    wait_matmul<0>(tQrdQ);
    if (kLoops) shared.k_barriers.release_by_warp(keys_at);
    if (kLoops) keys_at.advance();
    finish_dq(tQrdQ, stage_dq);
    if constexpr (!kLoops) {
      // Gradients are staged where V and K are. All warps have read V for the last dP since they have stored the last
      // dS; here they wait until all have read K for the last dQ.
      const auto last = ds_at.previous();
      shared.ds_empty[last.stage].wait(last.parity);
    }
  }

  /// Adds to dK and dV what one tile of queries contributes, and forms dQ of the tile before. `index` is the tile's, or
  /// under a column mask that of the step (see KeyBlock).
  template <class Gradient, class StageDq>
  CUTE_DEVICE void step(Work const& work, int head, int index, Gradient& tKrdK, Gradient& tVrdV,
                        StageDq const& stage_dq) {
    using namespace cute;
    typename Mainloop::MmaS mma_s;
    typename Mainloop::MmaP mma_p;
    typename Mainloop::MmaKV mma_kv;
    // As members these would be held in registers from one step to the next, since a matmul's asm reads what it
    // overwrites: there are too few registers for that.
    auto tSrS = Fragments::scores();    // (mma, n, m)
    auto tSrdP = Fragments::scores();   // (mma, n, m)
    auto tVrP = Fragments::rounded();   // (mma, n, k)
    auto tKrdS = Fragments::rounded();  // (mma, n, k)
    auto tQrdQ = Fragments::gradient_of_queries();
    Tensor scores = rows_and_columns(tSrS);        // (row, column)
    Tensor other = rows_and_columns(tSrdP);        // (row, column)
    Tensor weights = recast<std::uint32_t>(tVrP);  // two weights of a row to a word
    const int stage = uniform(at.stage);
    shared.q_barriers.wait_full(at);
    const auto [m_block, edge] = tile_of(work, index);
    start_matmul(mma_s, tSrK, tSrQ(_, _, _, stage), tSrS, ScaleOut::Zero);
    const int key = work.n_block * kN;
    Hidden hidden;
    if constexpr (Mainloop::kMasked) {
      if (edge)
        hidden.find(tScS, backward.columns.of_head(work.batch, head, work.span_of_keys(backward)) + key,
                    lengths.k - key, m_block * kM);
    }
    if (opening == ScaleOut::Zero) {
      shared.v_barriers.wait_full(keys_at);
      if constexpr (Mainloop::kKeepsV) {
        Fragments::load_values(shared.v, thread, tSrV);
        if (kLoops) shared.v_barriers.release_by_warp(keys_at);
      }
      if constexpr (!kLoops) ask_for_steep_rows();
    }
    shared.dout_barriers.wait_full(at);
    start_matmul(mma_p, tSrV, tSrdO(_, _, _, stage), tSrdP, ScaleOut::Zero);
    wait_matmul<1>(tSrS);

    const Tile tile{backward.scores, {work.batch, head, work.n_block}, key, lengths.transposed()};
    form_scores(scores, tile, hidden, edge, m_block);
    if (steep) [[unlikely]]
      relate_steep_rows(backward, scores, tScS, shared.statistics[stage][0],
                        std::int64_t(work.workspace_tile(backward, head, m_block)) * kM);
    if (kKnowsSoftcap && backward.scores.map.capped)
      weigh(scores, weights, stage, [&](float score) { return Tile::cap_slope(score); });
    else
      weigh(scores, weights, stage, [](float) { return 1.0f; });
    wait_matmul<0>(tSrdP);
    if constexpr (kKnowsDropout) {
      if (backward.dropout.active()) drop(other, weights, work, head, m_block);
    }
    start_matmul(mma_kv, tVrP, tVrdO(_, _, _, stage), tVrdV, opening);
    differentiate(scores, other, weights, stage);
    round_to(tSrS, tKrdS);
    share_scores(tKrdS);

    // Now dQ of the step before is formed. The other warpgroup has had time to store its dS, so the two need not keep
    // step. In the first step there is no such dS, and the product is discarded.
    if (started) shared.ds_full[dq_at.stage].wait(dq_at.parity);
    start_dq(tQrdQ);
    start_matmul(mma_kv, tKrdS, tKrQ(_, _, _, stage), tKrdK, opening);
    wait_matmul<2>(tVrdV);
    shared.dout_barriers.release_by_warp(at);
    wait_matmul<1>(tQrdQ);
    if (started) finish_dq(tQrdQ, stage_dq);
    wait_matmul<0>(tKrdK);
    shared.q_barriers.release_by_warp(at);
    at.advance();
    ds_at.advance();
    started = true;
    opening = ScaleOut::One;
  }

  /// Returns which tile of queries a step has, once Q is there, and whether it is at an edge of the mask.
  CUTE_DEVICE MaskedBlocksAround::Block tile_of(Work const& work, int index) const {
    if constexpr (Mainloop::kMasked) {
      const auto [m_block, edge] = shared.tiles[at.parity][at.stage];
      return {m_block, uniform(edge) != 0};
    } else {
      return {index, work.queries.is_edge(index)};
    }
  }

  /// Turns raw scores into scores, −inf where they do not count.
  template <class Scores>
  CUTE_DEVICE void form_scores(Scores& scores, Tile const& tile, Hidden const& hidden, bool edge, int m_block) {
    using namespace cute;
    if (!edge && !partial && !maps) return;
    if constexpr (kKnowsSoftcap) {
      if (maps) tile.cap_or_stretch(scores, tScS, m_block * kM);
    } else {
      if (maps) tile.stretch(scores, tScS, m_block * kM);
    }
    if constexpr (Mainloop::kMasked) {
      if (edge) hidden.hide(scores);
    }
    if (edge && (!Mainloop::kMasked || banded)) tile.mask(scores, tScS, m_block * kM);
    if (partial) hide_keys_behind(tile.lengths.q - tile.first_row, scores, tScS);
  }

  /// Turns scores into weights, rounded for dV, and `scores` into the factors of dP: these weights times
  /// `slope(score)`.
  template <class Scores, class Weights, class Slope>
  CUTE_DEVICE void weigh(Scores& scores, Weights& weights, int stage, Slope&& slope) {
    using namespace cute;
    for_column_pairs(tScS, shared.statistics[stage][0], [&](int c, float2 lse) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        const float a = exp2_approx(fmaf(scores(r, c), unit_log2, -lse.x));
        const float b = exp2_approx(fmaf(scores(r, c + 1), unit_log2, -lse.y));
        weights(c + r) = round_pair<Element>(a, b);
        scores(r, c) = a * slope(scores(r, c));
        scores(r, c + 1) = b * slope(scores(r, c + 1));
      }
    });
  }

  /// Sets to 0 what is dropped of the weights, and of dP in `other`.
  template <class Scores, class Weights>
  CUTE_DEVICE void drop(Scores& other, Weights& weights, Work const& work, int head, int m_block) {
    DropoutTile<Rows::kKeys>(backward.dropout, work.batch, head, work.n_block * kN, m_block * kM)
        .for_each(tScS, [&](int r, int c, auto kept) {
          kept.keep_words(weights, c);
          kept.keep(other, r, c);
        });
  }

  /// Turns weights, and dP in `other`, into dS in `scores`.
  template <class Scores, class Weights>
  CUTE_DEVICE void differentiate(Scores& scores, Scores& other, Weights& weights, int stage) {
    using namespace cute;
    for_column_pairs(tScS, shared.statistics[stage][1], [&](int c, float2 delta) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        const float2 weight =
            Mainloop::kRoundedWeights ? unround<Element>(weights(c + r)) : float2{scores(r, c), scores(r, c + 1)};
        if constexpr (kKnowsDropout) {
          const float scale = backward.dropout.scale;  // of the weights that stay
          scores(r, c) = weight.x * fmaf(scale, other(r, c), -delta.x);
          scores(r, c + 1) = weight.y * fmaf(scale, other(r, c + 1), -delta.y);
        } else {
          scores(r, c) = weight.x * (other(r, c) - delta.x);
          scores(r, c + 1) = weight.y * (other(r, c + 1) - delta.y);
        }
      }
    });
  }

  /// Gives this warp's part of dS to all warps, which wait for the whole of it to form dQ.
  template <class Rounded>
  CUTE_DEVICE void share_scores(Rounded const& tKrdS) {
    // Waits until all warps have read the dS that was in this buffer; on a new barrier nobody waits.
    shared.ds_empty[ds_at.stage].wait(ds_at.parity ^ 1);
    store_scores(tKrdS, ds_at.stage);
    cute::tma_store_fence();  // what was stored is visible to matmuls
    __syncwarp();
    if (thread % 32 == 0) shared.ds_full[ds_at.stage].arrive();
  }

  /// Returns where in shared memory a thread stores its first rows of dS.
  CUTE_DEVICE static std::uint32_t place_of_scores(SharedStorage& shared, int thread) {
    const int lane = thread % 32;
    const int key = thread / 32 * 16 + lane / 8 % 2 * 8;
    const int query = lane / 16 * 8 + lane % 8;
    return cute::cast_smem_ptr_to_uint(shared.ds[0] + typename Mainloop::PlacesOfdS{}(query, key, 0));
  }

  /// Stores dS (mma, key, query) as rows of queries: stmatrix transposes blocks of 8 × 8 on the way.
  template <class Rounded>
  CUTE_DEVICE void store_scores(Rounded const& tKrdS, int buffer) {
    using namespace cute;
    constexpr int kStep =
        typename Mainloop::PlacesOfdS{}(_16{}, _0{}, _0{}) * sizeof(Element);  // 16 queries on, with the same swizzle
    auto words = recast<std::uint32_t>(tKrdS);  // two words of each 8 queries, of keys r = 0, 1
    CUTE_UNROLL
    for (int i = 0; i < size(words); i += 4)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       place + buffer * int(sizeof(SharedStorage::ds[0])) + i / 4 * kStep),
                   "r"(words(i)), "r"(words(i + 1)), "r"(words(i + 2)), "r"(words(i + 3))
                   : "memory");
  }

  template <class Gradient>
  CUTE_DEVICE void start_dq(Gradient& tQrdQ) {
    using namespace cute;
    typename Mainloop::MmaQ mma_q;
    const int buffer = uniform(dq_at.stage);
    auto slice = mma_q.get_slice(warpgroup * 128);
    Tensor sKt = Fragments::tensor(
        shared.k, SmemTileT<Element, kN, Mainloop::kHeadDim, 1, Mainloop::kColumnsOfK>{});  // (head_dim, N, 1)
    Tensor sdS = Fragments::tensor(shared.ds[0], typename Mainloop::SmemLayoutdS{});        // (M, N, buffer)
    if constexpr (Mainloop::kTurned)
      start_matmul(mma_q, slice.partition_fragment_A(sKt)(_, _, _, 0), slice.partition_fragment_B(sdS)(_, _, _, buffer),
                   tQrdQ, ScaleOut::Zero);
    else
      start_matmul(mma_q, slice.partition_fragment_A(sdS)(_, _, _, buffer), slice.partition_fragment_B(sKt)(_, _, _, 0),
                   tQrdQ, ScaleOut::Zero);
  }
  template <class Gradient, class StageDq>
  CUTE_DEVICE void finish_dq(Gradient& tQrdQ, StageDq const& stage_dq) {
    __syncwarp();
    if (thread % 32 == 0) shared.ds_empty[dq_at.stage].arrive();  // this warp has read dS
    dq_at.advance();
    if (backward.dq == nullptr) return;
    // Waits until TMA has read the dQ of the step before; on a new barrier nobody waits.
    shared.dq_empty[warpgroup].wait(dq_parity ^ 1);
    if constexpr (Mainloop::kWhole)
      stage_dq(tQrdQ, reinterpret_cast<Element*>(shared.dq[warpgroup]));
    else
      stage_part(tQrdQ);
    cute::tma_store_fence();
    __syncwarp();
    if (thread % 32 == 0) shared.dq_full[warpgroup].arrive();
    dq_parity ^= 1;
  }

  /// Puts a warpgroup's part of dQ where the writer takes it: each thread's accumulators as they are, four by four,
  /// next to those of the other threads.
  template <class Gradient>
  CUTE_DEVICE void stage_part(Gradient& tQrdQ) {
    using namespace cute;
    float4* const part = reinterpret_cast<float4*>(shared.dq[warpgroup]) + thread % 128;
    CUTE_UNROLL
    for (int i = 0; i < size(tQrdQ); i += 4) part[i / 4 * 128] = {tQrdQ(i), tQrdQ(i + 1), tQrdQ(i + 2), tQrdQ(i + 3)};
  }

  BackwardParams const& backward;
  SharedStorage& shared;
  const int thread;
  const int warpgroup = uniform(thread / 128);
  decltype(Fragments::template keys<Mainloop::kColumnsOfK>(nullptr, 0)) tSrK =
      Fragments::template keys<Mainloop::kColumnsOfK>(shared.k, warpgroup);                        // (mma, n, k)
  decltype(Fragments::values(nullptr, 0)) tSrV = Fragments::values(shared.v, thread);              // (mma, n, k)
  decltype(Fragments::queries(nullptr, 0)) tSrQ = Fragments::queries(shared.q[0], warpgroup);      // (mma, m, k, stage)
  decltype(Fragments::queries(nullptr, 0)) tSrdO = Fragments::queries(shared.dout[0], warpgroup);  // (mma, m, k, stage)
  decltype(Fragments::queries_t(nullptr, 0)) tVrdO =
      Fragments::queries_t(shared.dout[0], thread);  // (mma, head_dim, k, stage)
  decltype(Fragments::queries_t(nullptr, 0)) tKrQ =
      Fragments::queries_t(shared.q[0], thread);                    // (mma, head_dim, k, stage)
  decltype(Fragments::places(0)) tScS = Fragments::places(thread);  // (row, column)
  const bool maps = backward.scores.map.maps();
  // Under a column mask the band may hide something, too.
  const bool banded = Mainloop::kMasked && !backward.scores.mask.shows_all();
  const float unit_log2 = backward.scores.map.unit_log2;
  typename Ring<Mainloop::kStages>::Cursor at{};  // current tile of queries
  typename Ring<2>::Cursor ds_at{};               // buffer for its dS
  typename Ring<2>::Cursor dq_at{};               // buffer of the dS that dQ is formed of
  typename Ring<1>::Cursor keys_at{};
  const std::uint32_t place = place_of_scores(shared, thread);
  unsigned dq_parity = 0;
  Lengths lengths;   // those of the current block of keys
  bool partial;      // whether the block reaches beyond the last key
  bool steep;        // whether any row is, of all blocks
  bool started;      // whether a step before has left dS to form dQ of
  ScaleOut opening;  // a block's first matmuls overwrite dK and dV
};

}  // namespace flashtile
