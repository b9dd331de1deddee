// This file has the consumers of Hopper's forward kernel: the warpgroups that multiply and turn scores into weights.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/forward_sm90/block_mask.h"
#include "flashtile/mainloop/forward_sm90/descaled_weights.h"
#include "flashtile/mainloop/forward_sm90/fragments.h"
#include "flashtile/mainloop/forward_sm90/largest_logits.h"
#include "flashtile/mainloop/forward_sm90/long_sums.h"
#include "flashtile/mainloop/forward_sm90/pure_scores.h"
#include "flashtile/mainloop/forward_sm90/steps_in_one.h"
#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mainloop/wgmma.h"
#include "flashtile/math/round.h"

namespace flashtile {

/// ForwardConsumerSm90 is one thread of the consumers; `thread` counts from the first of them.
template <class Mainloop>
class ForwardConsumerSm90 {
  using Params = typename Mainloop::Params;
  using SharedStorage = typename Mainloop::SharedStorage;
  using Element = typename Mainloop::Element;
  using Work = typename Mainloop::Work;
  using Fragments = ForwardFragmentsSm90<Mainloop>;
  using WorkCursor = typename Ring<Mainloop::kWorks>::Cursor;
  using ScaleOut = cute::SM90::GMMA::ScaleOut;
  static constexpr int kM = Mainloop::kM;
  static constexpr int kN = Mainloop::kN;
  static constexpr bool kKeepQ = Mainloop::kKeepQ;

 public:
  CUTE_DEVICE ForwardConsumerSm90(Params const& params, SharedStorage& shared, int thread)
      : params(params),
        shared(shared),
        thread(thread),
        // With a single stage of Q its descriptors are constants, which wait in ordinary registers, without uniform().
        warpgroup(Mainloop::kStagesQ == 1 ? thread / 128 : uniform(thread / 128)) {}

  /// Computes tile after tile. Calls `ask(work)` for what comes from memory and is needed at the end of a tile, where
  /// the tile begins, then `finish(work, accumulators, softmax state, what was asked for)`, or `skip(work)` if it sees
  /// no key. With fixed parts it calls `end_part(work, part, accumulators, softmax state)` for each but the last one.
  template <class Ask, class EndPart, class Finish, class Skip>
  CUTE_DEVICE void run(Ask&& ask, EndPart&& end_part, Finish&& finish, Skip&& skip) {
    decltype(ask(work())) asked;
    const auto finish_work = [&](WorkCursor at) {
      if constexpr (Mainloop::kScaled) {
        long_sums.add_to(staging(), tOrO);
        descaled.finish(softmax, rows_and_columns(tOrO), maps);
      }
      if constexpr (Mainloop::kWidens) descale(shared.work[at.stage]);
      finish(shared.work[at.stage], tOrO, softmax, asked);
      shared.work_barriers.release_by_thread(at);
    };
    turns.begin();
    CUTE_NO_UNROLL
    while (true) {
      if (!next_tile()) {
        if (walk.end() < 0) return;
        skip(work());
        end_weighing();
        shared.work_barriers.release_by_thread(work_at);
        work_at.advance();
        continue;
      }
      take_q();
      shared.k_barriers.wait_full(k_at);
      turns.await();
      start_scores();
      turns.pass();
      wait_matmul<0>(tSrS);
      while (true) {
        asked = ask(work());
        weigh_blocks(end_part);
        end_weighing();
        const WorkCursor last_at = work_at;
        work_at.advance();
        const bool goes_on = next_tile();
        if constexpr (Mainloop::kScaled) shared.v_barriers.wait_full(v_at);
        if (!goes_on) {
          start_output();
          finish_output<0>();
          finish_work(last_at);
          break;
        }
        turns.await();
        start_output();
        take_q();
        shared.k_barriers.wait_full(k_at);
        start_scores();
        turns.pass();
        finish_output<1>();
        finish_work(last_at);
        wait_matmul<0>(tSrS);
      }
    }
  }

 private:
  CUTE_DEVICE Work& work() const { return shared.work[work_at.stage]; }
  CUTE_DEVICE void* staging() const { return shared.staging[thread / 32]; }

  /// Waits for the next tile and returns whether it sees a key; if not, it sees none, or there is no tile.
  CUTE_DEVICE bool next_tile() {
    shared.work_barriers.wait_full(work_at);
    walk = work().keys.walk();
    return walk.end() > 0;
  }

  /// Waits for the rows of Q. Where they are kept in registers, it gives their stage back to the producer at once.
  CUTE_DEVICE void take_q() {
    using namespace cute;
    auto& barriers = shared.q_barriers[warpgroup];
    barriers.wait_full(q_at);
    if constexpr (kKeepQ) {
      Tensor sQ = Fragments::shared_q(shared);
      const auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma_qk);
      const auto copy_q_thread = copy_q.get_slice(thread);
      copy(copy_q, copy_q_thread.partition_S(sQ(_, _, q_at.stage)), copy_q_thread.retile_D(tSrQ));
      barriers.release_by_thread(q_at);
      q_at.advance();
    }
  }

  CUTE_DEVICE void start_scores() {
    using namespace cute;
    const int k_stage = k_at.stage;
    const int q_stage = kKeepQ || Mainloop::kStagesQ == 1 ? 0 : uniform(q_at.stage);
    if constexpr (kKeepQ)
      start_matmul(mma_qk, tSrQ, tSrK(_, _, _, k_stage), tSrS, ScaleOut::Zero);
    else
      start_matmul(mma_qk, tSrQ(_, _, _, q_stage), tSrK(_, _, _, k_stage), tSrS, ScaleOut::Zero);
  }

  /// Gives stages back to the producer when a block's scores are there: that of K, and with the last block that of Q.
  CUTE_DEVICE void release_operands(int n_block) {
    shared.k_barriers.release_by_warp(k_at);
    k_at.advance();
    if (!kKeepQ && n_block == walk.last()) {
      shared.q_barriers[warpgroup].release_by_warp(q_at);
      q_at.advance();
    }
  }

  /// Starts P·V of the block whose weights are there.
  CUTE_DEVICE void start_output() {
    using namespace cute;
    if constexpr (!Mainloop::kScaled) shared.v_barriers.wait_full(v_at);
    start_matmul(mma_pv, tOrP, tOrV(_, _, _, v_at.stage), tOrO, opening);
  }
  /// Waits for that P·V, while kPending matmuls that were started later may go on, and gives the stage of V back.
  template <int kPending>
  CUTE_DEVICE void finish_output() {
    wait_matmul<kPending>(tOrO);
    shared.v_barriers.release_by_warp(v_at);
    v_at.advance();
  }

  /// Turns the scores of all blocks of a tile, the first of which are there already, into weights, and adds up P·V of
  /// all but the last block.
  template <class EndPart>
  CUTE_DEVICE void weigh_blocks(EndPart&& end_part) {
    look_at<true>(walk.first());
    release_operands(walk.first());
    opening = ScaleOut::Zero;
    if constexpr (Mainloop::kScaled) long_sums.begin();
    if constexpr (Mainloop::kWidens) softmax.unit_log2 = params.forward.scores.map.unit_log2 * work().more.of_scores;
    if constexpr (Mainloop::kOneCopy)
      weigh_by_one_copy(end_part);
    else
      weigh_by_copies();
  }

  /// Does so with code of its own for the first block, for those that need a mask, and for those that need none.
  CUTE_DEVICE void weigh_by_copies() {
    int n_block = walk.first();
    form_scores(n_block);
    bool weighed = weigh<true>();
    CUTE_NO_UNROLL
    while (true) {
      if (!weighed) [[unlikely]]
        weigh_again();
      if constexpr (Mainloop::kKnowsDropout) {
        if (drops) drop(n_block);
      }
      n_block = walk.next(n_block);
      if (n_block == walk.end()) break;
      if (Mainloop::kPeelsPlain && !maps && !drops && !walk.is_edge(n_block) && !has_no_limits()) {
        weighed = weigh_interior(n_block, walk.interior.end, [&](int) { return weigh<false>(); });
      } else {
        weighed = step<true>(n_block, [&](int) { return weigh<false>(); });
      }
    }
  }
  /// Returns whether limits are still to be set by what is known of the largest logits: that is done in the step of the
  /// second block, while P·V goes on, when most warps have told the largest scores of the first.
  CUTE_DEVICE bool has_no_limits() const { return Mainloop::kExchangesLargest && opening == ScaleOut::Zero; }

  /// Does so with one copy of the code for all blocks but those of long runs, which loops of their own take. What maps
  /// scores is long, and a call of few blocks would take as long to fetch more copies as to run them.
  template <class EndPart>
  CUTE_DEVICE void weigh_by_one_copy(EndPart&& end_part) {
    int n_block = walk.first();
    bool formed = false;
    CUTE_NO_UNROLL
    while (true) {
      if (!formed) form_scores(n_block);
      if (opening == ScaleOut::Zero) {
        softmax.begin(rows_and_columns(tSrS));
        if constexpr (Mainloop::kExchangesLargest) {
          largest_logits().tell_references();
          largest_logits().find_limits();
        }
      }
      if (!weigh<false>()) [[unlikely]]
        weigh_again();
      bool weighed = true;
      CUTE_NO_UNROLL
      while (weighed) {
        if constexpr (Mainloop::kKnowsDropout) {
          if (drops) drop(n_block);
        }
        n_block = walk.next(n_block);
        if (n_block == walk.end()) return;
        formed = false;
        weighed = take_steps(n_block, formed, end_part);
      }
    }
  }

  /// Takes one or more steps from that of `n_block` on; the last one taken becomes `n_block`. If it returns false, the
  /// scores of that one are still to be weighed, or, after a run of plain ones, weighed anew, and before that to be
  /// formed, unless it sets `formed`.
  template <class EndPart>
  CUTE_DEVICE bool take_steps(int& n_block, bool& formed, EndPart&& end_part) {
    const int of_part = Mainloop::kFixedParts ? block_of_part(n_block) : 1;
    if constexpr (Mainloop::kMapsInOne) {
      const int end = steps_in_one().end(n_block);
      if (n_block < end) return map_interior(n_block, end);
    } else if (Mainloop::kPeelsPlain && !maps && !drops && of_part > 0 && !walk.is_edge(n_block)) {
      const int end_of_part = n_block - of_part + Mainloop::kBlocksOfPart;
      const int end = Mainloop::kFixedParts ? min(end_of_part, walk.interior.end) : walk.interior.end;
      return weigh_interior(n_block, end, [&](int) { return weigh<false>(); });
    }
    start_step<true>(n_block);
    formed = Mainloop::kFormsMeanwhile;
    if (formed) form_scores(n_block);
    finish_output<0>();
    if constexpr (Mainloop::kFixedParts) {
      if (of_part == 0) {  // the weights of a part are relative to a reference of its own, and its sums begin anew
        end_part(work(), work().keys.key(n_block) / (kN * Mainloop::kBlocksOfPart) - 1, tOrO, softmax);
        opening = ScaleOut::Zero;
      }
    }
    return false;
  }
  /// Returns which block of a fixed part a block is.
  CUTE_DEVICE int block_of_part(int n_block) const {
    return (work().keys.first / kN + n_block) % Mainloop::kBlocksOfPart;
  }

  /// Takes steps from that of `n_block` to `end`, whose blocks need no form_scores(), but stops where weights have to
  /// be computed again. The last step taken becomes `n_block`.
  template <class Weigh>
  CUTE_DEVICE bool weigh_interior(int& n_block, int end, Weigh&& weigh_block) {
    bool weighed;
    CUTE_NO_UNROLL
    while ((weighed = step<false>(n_block, weigh_block)) && walk.next(n_block) < end) n_block = walk.next(n_block);
    return weighed;
  }

  CUTE_DEVICE StepsInOne<Mainloop> steps_in_one() const { return {params.forward, work(), walk, drops}; }

  /// Does what weigh_interior() does for raw scores, up to the end that StepsInOne gave. Where it returns false,
  /// since weigh() would, or since a score is not near 0, as CappedExponents needs it, the last block's stay raw.
  CUTE_DEVICE bool map_interior(int& n_block, int end) {
    ScoreMap const& map = params.forward.scores.map;
    const auto cap = [&](auto make_exponents) {
      return weigh_interior(n_block, end, [&](int) {
        auto exponents = make_exponents();
        softmax.weigh_by(exponents, tSrS, tOrP, added);
        return accept(exponents.far());
      });
    };
    if (map.capped && map.three_near_terms()) return cap([&] { return CappedExponents<3>{map, softmax.offset}; });
    if (map.capped) return cap([&] { return CappedExponents<4>{map, softmax.offset}; });
    const float slope = (steps_in_one().behind_origin(work().keys.visited(n_block)) ? kLog2e : -kLog2e) * work().slope;
    return weigh_interior(n_block, end, [&](int step) {
      const auto tile = score_tile();
      const int first_column = work().keys.visited(step) * kN;
      const auto first = [&](int r) {
        return fmaf(-slope, tile.distance_of_first(tScS, r, first_column), -softmax.offset[r]);
      };
      softmax.weigh_by(StretchedExponents{map, slope, {first(0), first(1)}}, tSrS, tOrP, added);
      return accept(false);
    });
  }

  /// Starts P·V of the block before `n_block`, and waits for the raw scores of `n_block`.
  template <bool kMayBeEdge>
  CUTE_DEVICE void start_step(int n_block) {
    shared.k_barriers.wait_full(k_at);
    if constexpr (Mainloop::kScaled) shared.v_barriers.wait_full(v_at);  // so that the turn is short
    turns.await();
    start_scores();
    start_output();
    opening = ScaleOut::One;
    turns.pass();
    look_at<kMayBeEdge>(n_block);
    wait_matmul<1>(tSrS);
    release_operands(n_block);
  }

  /// Adds P·V of the block before `n_block`, and forms the weights of `n_block`.
  template <bool kForm, class Weigh>
  CUTE_DEVICE bool step(int n_block, Weigh&& weigh) {
    const bool finds_limits = kForm && has_no_limits();
    start_step<kForm>(n_block);
    if constexpr (kForm) form_scores(n_block);  // P·V goes on meanwhile
    if constexpr (kForm && Mainloop::kExchangesLargest) {
      if (finds_limits) largest_logits().find_limits();
    }
    finish_output<0>();
    if constexpr (Mainloop::kScaled) {
      if (long_sums.take(staging(), tOrO)) [[unlikely]]
        opening = ScaleOut::Zero;
    }
    return weigh(n_block);
  }

  /// Turns the raw scores of a step's block into scores, −inf where they do not count.
  CUTE_DEVICE void form_scores(int step) {
    auto scores = rows_and_columns(tSrS);                         // (row, column)
    const int n_block = maps ? work().keys.visited(step) : step;  // only ALiBi, which maps, changes the order
    const bool edge = walk.is_edge(n_block);
    if (!edge && !maps) return;
    if constexpr (Mainloop::kScaled) {
      if (maps) descaled.multiply(scores);
    }
    const auto score_tile = this->score_tile();
    if (maps) {
      const int first_column = mask.first_column(n_block);
      if constexpr (Mainloop::kFixedParts)
        PureScoreTile<HeadPacking>{score_tile}.map(scores, tScS, first_column);
      else
        score_tile.template map<Softcaps::kUsual>(scores, tScS, first_column);
    }
    if (edge) mask.hide(work(), score_tile, scores, tScS, n_block);
  }

  /// Finds what does not depend on the scores of the block of a step: what column masks hide of it, and its descales.
  template <bool kMayBeEdge>
  CUTE_DEVICE void look_at(int step) {
    if constexpr (Mainloop::kScaled) {
      const auto of_block = shared.few.descales[k_at.stage];
      if (step == walk.first())
        descaled.begin(work().more.q_descales[warpgroup], of_block, softmax, params.forward.scores.map.unit_log2, maps);
      descaled.take(of_block, maps);
    }
    mask.template look_at<kMayBeEdge>(work(), walk, step, k_at.stage, first_row_of_warp());
  }

  /// Returns the first row of the thread's warp, counted among those of the head.
  CUTE_DEVICE int first_row_of_warp() const {
    return work().tile.m_block * kM + cute::get<0>(tScS(0, 0)) - thread % 32 / 4;
  }

  CUTE_DEVICE ScoreTile<HeadPacking> score_tile() const {
    return {params.forward.scores, work().tile, work().tile.m_block * kM, work().keys.lengths, &work().slope};
  }

  /// Turns scores into weights. Few blocks outgrow the reference that the tile's first block has set, and few rows are
  /// steep: for these it returns false, and leaves them to weigh_again(). So the loops have what all blocks need, and
  /// nothing else.
  template <bool kFirst>
  CUTE_DEVICE bool weigh() {
    if constexpr (Mainloop::kScaled) {
      if (kFirst) descaled.multiply(rows_and_columns(tSrS));
      if (kFirst) softmax.begin(rows_and_columns(tSrS));
      if (descaled.is_far()) [[unlikely]] {
        added = {{kInfinity, kInfinity}};
        return false;
      }
      descaled.weigh(softmax, tSrS, tOrP, added, false, false);
      return accept(false);
    }
    if (kFirst) softmax.begin(rows_and_columns(tSrS));
    if constexpr (kFirst && Mainloop::kExchangesLargest) largest_logits().tell_references();
    if constexpr (Mainloop::kKeepsLargest) largest_logits().keep(rows_and_columns(tSrS));
    softmax.weigh(tSrS, tOrP, added, false);  // without a branch before it, it begins while P·V is waited for
    return accept(false);
  }

  CUTE_DEVICE LargestLogits<Mainloop> largest_logits() {
    return {params.forward, shared, work(), softmax, int(cute::get<0>(tScS(0, 0)))};
  }
  /// Tells who exchanges the largest logits that the warp has seen all scores of the tile, or raises those of all
  /// itself where nobody waits for that.
  CUTE_DEVICE void end_weighing() {
    if constexpr (Mainloop::kKeepsLargest) largest_logits().tell_kept();
    if constexpr (Mainloop::kFindsLargest) __syncwarp();
    if constexpr (Mainloop::kHasExchange) {
      if (thread % 32 == 0) shared.weighed[work_at.stage].arrive();
    } else if constexpr (Mainloop::kFindsLargest) {
      LargestLogitsExchange<Mainloop>{params.forward, shared}.tell_all(work());
    }
  }

  /// Adds up the sums of the block's weights, unless a row has outgrown its reference, or its limit, or the weights are
  /// `wrong`.
  CUTE_DEVICE bool accept(bool wrong) {
    if (softmax.outgrown(added, wrong)) return false;
    add_sums();
    return true;
  }
  CUTE_DEVICE void add_sums() {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) softmax.row[r].sum += added.of_row[r];
  }

  /// Computes the block's weights anew, with references that its scores do not exceed, and in steep rows from
  /// differences, formed before they are multiplied. The references of a tile's first block are its maxima already, so
  /// raise() leaves them; the sums that it rescales are 0 then, and the next P·V overwrites O. Where the block may only
  /// have one of the largest logits, its weights stay.
  CUTE_DEVICE void weigh_again() {
    auto scores = rows_and_columns(tSrS);  // (row, column)
    if constexpr (Mainloop::kExchangesLargest) {
      if (!softmax.outgrown_reference(added)) {
        largest_logits().look(scores);
        return add_sums();
      }
    }
    float factor[2], of_values = 1;
    if constexpr (Mainloop::kScaled) {
      descaled.multiply(scores);
      of_values = descaled.move();
    }
    softmax.raise(scores, added, factor);
    if constexpr (Mainloop::kExchangesLargest) largest_logits().look(scores);
    if constexpr (Mainloop::kScaled) {
      factor[0] *= of_values, factor[1] *= of_values;
      long_sums.scale(staging(), factor);
    }
    scale_rows(rows_and_columns(tOrO), factor);
    softmax.relate(scores);
    if constexpr (Mainloop::kScaled)
      descaled.weigh(softmax, tSrS, tOrP, added, true, true);
    else
      softmax.weigh(tSrS, tOrP, added, true);
    add_sums();
  }

  /// Makes the rows of a finished tile those of scores in units of the score map, and multiplies its output.
  CUTE_DEVICE void descale(Work const& finished) {
    const float of_output[] = {finished.more.of_output, finished.more.of_output};
    scale_rows(rows_and_columns(tOrO), of_output);
    CUTE_UNROLL
    for (auto& row : softmax.row) row.reference *= finished.more.of_scores;
  }

  CUTE_DEVICE void drop(int n_block) {
    auto weights = cute::recast<std::uint32_t>(tOrP);
    DropoutTile<Rows::kQueries>(params.forward.dropout, work().tile.batch, work().tile.head, work().tile.m_block * kM,
                                mask.key(work(), n_block))
        .for_each(tScS, [&](int, int c, auto kept) { kept.keep_words(weights, c); });
  }

  Params const& params;
  SharedStorage& shared;
  const int thread;
  const int warpgroup;
  typename Mainloop::MmaQK mma_qk;
  typename Mainloop::MmaPV mma_pv;
  decltype(Fragments::q(shared, 0, 0)) tSrQ = Fragments::q(shared, thread, warpgroup);
  decltype(Fragments::k(shared, 0)) tSrK = Fragments::k(shared, thread);  // (mma, n, k, stage)
  decltype(Fragments::v(shared, 0)) tOrV = Fragments::v(shared, thread);  // (mma, head_dim, k, stage)
  decltype(Fragments::places(0)) tScS = Fragments::places(thread);        // (row, column)
  decltype(Fragments::scores()) tSrS = Fragments::scores();               // (mma, m, n)
  decltype(Fragments::weights()) tOrP = Fragments::weights();             // (mma, m, k)
  decltype(Fragments::output()) tOrO = Fragments::output();               // (mma, m, head_dim)
  WorkCursor work_at{};                                                   // current tile
  typename Ring<Mainloop::kStagesQ>::Cursor q_at{};
  // There are two cursors, though one follows the other: a step uses each and then advances it, so both stay uniform.
  typename Ring<Mainloop::kStages>::Cursor k_at{};   // K of the next block
  typename Ring<Mainloop::kStagesV>::Cursor v_at{};  // V of the current block
  const Turns<Mainloop::kWarpgroups> turns{warpgroup};
  const bool maps = Mainloop::maps(params.forward.scores.map);
  const bool drops = Mainloop::kKnowsDropout && params.forward.dropout.active();
  typename Mainloop::Softmax softmax{params.forward.scores.map.unit_log2};
  typename Mainloop::Softmax::Sums added;  // of the current block
  BlockWalk walk;                          // over the key blocks of the current tile, or over its steps
  BlockMask<Mainloop> mask{params.forward, shared};
  [[no_unique_address]] std::conditional_t<Mainloop::kScaled, DescaledWeights<Mainloop>, NotDescaled> descaled;
  [[no_unique_address]] std::conditional_t<Mainloop::kScaled, LongSums<Mainloop>, NoLongSums> long_sums;
  ScaleOut opening = ScaleOut::Zero;  // the first P·V of a tile, or of a fixed part, overwrites what the last one left
};

}  // namespace flashtile
