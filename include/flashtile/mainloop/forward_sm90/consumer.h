// This file has the consumers of Hopper's forward kernel: the warpgroups that multiply and turn scores into weights.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/forward_sm90/fragments.h"
#include "flashtile/mainloop/forward_sm90/steps_in_one.h"
#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/mainloop/forward_sm90/weigher.h"
#include "flashtile/mainloop/wgmma.h"

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
        // Where parts are summed up, none is left for them.
        warpgroup(Mainloop::kStagesQ == 1 && !Mainloop::kFixedParts ? thread / 128 : uniform(thread / 128)) {}

  /// Computes tile after tile. Calls `ask(work)` for what comes from memory and is needed at the end of a tile, where
  /// the tile begins, then `finish(work, accumulators, softmax state, what was asked for)`, or `skip(work)` if it sees
  /// no key. With fixed parts it calls `end_part(work, part, accumulators, softmax state)` for each but the last one,
  /// when the row sums of that state are complete.
  template <class Ask, class EndPart, class Finish, class Skip>
  CUTE_DEVICE void run(Ask&& ask, EndPart&& end_part, Finish&& finish, Skip&& skip) {
    decltype(ask(work())) asked;
    const auto finish_work = [&](WorkCursor at) {
      weigher.descale(shared.work[at.stage]);
      finish(shared.work[at.stage], weigher.tOrO, weigher.softmax, asked);
      shared.work_barriers.release_by_thread(at);
    };
    turns.begin();
    CUTE_NO_UNROLL
    while (true) {
      if (!next_tile()) {
        if (walk.end() < 0) return;
        skip(work());
        weigher.end_weighing();
        shared.work_barriers.release_by_thread(weigher.work_at);
        weigher.work_at.advance();
        continue;
      }
      take_q();
      shared.k_barriers.wait_full(k_at);
      turns.await();
      start_scores();
      turns.pass();
      wait_matmul<0>(weigher.tSrS);
      while (true) {
        asked = ask(work());
        weigh_blocks(end_part);
        weigher.end_weighing();
        const WorkCursor last_at = weigher.work_at;
        weigher.work_at.advance();
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
        wait_matmul<0>(weigher.tSrS);
      }
    }
  }

 private:
  CUTE_DEVICE Work& work() const { return weigher.work(); }

  /// Waits for the next tile and returns whether it sees a key; if not, it sees none, or there is no tile.
  CUTE_DEVICE bool next_tile() {
    shared.work_barriers.wait_full(weigher.work_at);
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
      start_matmul(mma_qk, tSrQ, tSrK(_, _, _, k_stage), weigher.tSrS, ScaleOut::Zero);
    else
      start_matmul(mma_qk, tSrQ(_, _, _, q_stage), tSrK(_, _, _, k_stage), weigher.tSrS, ScaleOut::Zero);
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
    start_matmul(mma_pv, weigher.tOrP, tOrV(_, _, _, v_at.stage), weigher.tOrO, opening);
  }
  /// Waits for that P·V, while kPending matmuls that were started later may go on, and gives the stage of V back.
  template <int kPending>
  CUTE_DEVICE void finish_output() {
    wait_matmul<kPending>(weigher.tOrO);
    shared.v_barriers.release_by_warp(v_at);
    v_at.advance();
  }

  /// Turns the scores of all blocks of a tile, the first of which are there already, into weights, and adds up P·V of
  /// all but the last block.
  template <class EndPart>
  CUTE_DEVICE void weigh_blocks(EndPart&& end_part) {
    weigher.template look_at<true>(walk, walk.first(), k_at.stage);
    release_operands(walk.first());
    opening = ScaleOut::Zero;
    if constexpr (Mainloop::kFixedParts) blocks_before = work().keys.first / kN;
    if constexpr (Mainloop::kScaled) weigher.long_sums.begin();
    if constexpr (Mainloop::kWidens)
      weigher.softmax.unit_log2 = params.forward.scores.map.unit_log2 * work().more.of_scores;
    if constexpr (Mainloop::kOneCopy)
      weigh_by_one_copy(end_part);
    else
      weigh_by_copies();
  }

  /// Does so with code of its own for the first block, for those that need a mask, and for those that need none.
  CUTE_DEVICE void weigh_by_copies() {
    int n_block = walk.first();
    weigher.form_scores(walk, n_block);
    bool weighed = weigher.template weigh<true>();
    CUTE_NO_UNROLL
    while (true) {
      if (!weighed) [[unlikely]]
        weigher.weigh_again();
      if constexpr (Mainloop::kKnowsDropout) {
        if (weigher.drops) weigher.drop(n_block);
      }
      n_block = walk.next(n_block);
      if (n_block == walk.end()) break;
      if (Mainloop::kPeelsPlain && !weigher.maps && !weigher.drops && !walk.is_edge(n_block) && !has_no_limits()) {
        weighed = weigh_interior(n_block, walk.interior.end, [&](int) { return weigher.template weigh<false>(); });
      } else {
        weighed = step<true>(n_block, [&](int) { return weigher.template weigh<false>(); });
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
      if (!formed) weigher.form_scores(walk, n_block);
      if (opening == ScaleOut::Zero) {
        weigher.begin();
        if constexpr (Mainloop::kExchangesLargest) weigher.largest_logits().find_limits();
      }
      if (!weigher.template weigh<false>()) [[unlikely]]
        weigher.weigh_again();
      // Each `break` leads to code that forms new weights, so that the old ones take no register from what comes before
      // it. A flag that told why the loop has ended would keep them.
      CUTE_NO_UNROLL
      while (true) {
        if constexpr (Mainloop::kKnowsDropout) {
          if (weigher.drops) weigher.drop(n_block);
        }
        n_block = walk.next(n_block);
        if (n_block == walk.end()) return;
        const int of_part = block_of_part(n_block), end = end_of_run(n_block, of_part);
        if (n_block == end) {
          formed = take_step(n_block, of_part == 0, end_part);
          break;
        }
        if (!take_run(n_block, end)) {
          formed = false;
          break;
        }
      }
    }
  }

  /// Returns the end of the run of steps from that of `n_block` on which has a loop of its own, or `n_block` if there
  /// is none. What begins a part is in no run.
  CUTE_DEVICE int end_of_run(int n_block, int of_part) const {
    if constexpr (Mainloop::kMapsInOne) {
      return steps_in_one().end(n_block);
    } else {
      if (!Mainloop::kPeelsPlain || weigher.maps || weigher.drops || walk.is_edge(n_block)) return n_block;
      if constexpr (!Mainloop::kFixedParts) return walk.interior.end;
      return of_part == 0 ? n_block : min(n_block - of_part + Mainloop::kBlocksOfPart, walk.interior.end);
    }
  }

  /// Takes steps of a run from that of `n_block` on; the last one taken becomes `n_block`. If it returns false, the raw
  /// scores of that one are still to be formed and weighed.
  CUTE_DEVICE bool take_run(int& n_block, int end) {
    if constexpr (Mainloop::kMapsInOne) {
      return map_interior(n_block, end);
    } else {
      if constexpr (Mainloop::kWarpgroups == 1) {
        if (weigher.has_few_rows()) return weigh_interior(n_block, end, [&](int) { return weigher.weigh_few_rows(); });
      }
      return weigh_interior(n_block, end, [&](int) { return weigher.template weigh<false>(); });
    }
  }

  /// Takes the step of a block that is in no run, but does not weigh its scores. Returns whether they are formed. Where
  /// the block begins a part, its weights are relative to a reference of their own, and sums begin anew.
  template <class EndPart>
  CUTE_DEVICE bool take_step(int n_block, bool begins_part, EndPart&& end_part) {
    start_step<true>(n_block, [&] {
      if (begins_part) weigher.softmax.finish_sums();
    });
    if (Mainloop::kFormsMeanwhile) weigher.form_scores(walk, n_block);
    finish_output<0>();
    if constexpr (Mainloop::kFixedParts) {
      if (begins_part) {
        end_part(work(), work().keys.key(n_block) / (kN * Mainloop::kBlocksOfPart) - 1, weigher.tOrO, weigher.softmax);
        opening = ScaleOut::Zero;
      }
    }
    return Mainloop::kFormsMeanwhile;
  }
  /// Returns which block of a fixed part a block is.
  CUTE_DEVICE int block_of_part(int n_block) const {
    return Mainloop::kFixedParts ? (blocks_before + n_block) % Mainloop::kBlocksOfPart : 1;
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

  CUTE_DEVICE StepsInOne<Mainloop> steps_in_one() const { return {params.forward, work(), walk, weigher.drops}; }

  /// Does what weigh_interior() does for raw scores, up to the end that StepsInOne gave. Where it returns false, the
  /// last block's stay raw.
  CUTE_DEVICE bool map_interior(int& n_block, int end) {
    ScoreMap const& map = params.forward.scores.map;
    if (map.capped && map.three_near_terms())
      return weigh_interior(n_block, end, [&](int) { return weigher.template weigh_capped<3>(); });
    if (map.capped) return weigh_interior(n_block, end, [&](int) { return weigher.template weigh_capped<4>(); });
    const float slope = (steps_in_one().behind_origin(work().keys.visited(n_block)) ? kLog2e : -kLog2e) * work().slope;
    return weigh_interior(n_block, end, [&](int step) { return weigher.weigh_stretched(slope, step); });
  }

  /// Starts P·V of the block before `n_block`, and waits for the raw scores of `n_block`; calls meanwhile() before
  /// that.
  template <bool kMayBeEdge, class Meanwhile>
  CUTE_DEVICE void start_step(int n_block, Meanwhile&& meanwhile) {
    shared.k_barriers.wait_full(k_at);
    if constexpr (Mainloop::kScaled) shared.v_barriers.wait_full(v_at);  // so that the turn is short
    turns.await();
    start_scores();
    start_output();
    opening = ScaleOut::One;
    turns.pass();
    weigher.template look_at<kMayBeEdge>(walk, n_block, k_at.stage);
    meanwhile();
    wait_matmul<1>(weigher.tSrS);
    release_operands(n_block);
  }

  /// Adds P·V of the block before `n_block`, and forms the weights of `n_block`.
  template <bool kForm, class Weigh>
  CUTE_DEVICE bool step(int n_block, Weigh&& weigh) {
    const bool finds_limits = kForm && has_no_limits();
    start_step<kForm>(n_block, [] {});
    if constexpr (kForm) weigher.form_scores(walk, n_block);  // P·V goes on meanwhile
    if constexpr (kForm && Mainloop::kExchangesLargest) {
      if (finds_limits) weigher.largest_logits().find_limits();
    }
    finish_output<0>();
    if constexpr (Mainloop::kScaled) {
      if (weigher.long_sums.take(weigher.staging(), weigher.tOrO)) [[unlikely]]
        opening = ScaleOut::Zero;
    }
    return weigh(n_block);
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
  typename Ring<Mainloop::kStagesQ>::Cursor q_at{};
  // There are two cursors, though one follows the other: a step uses each and then advances it, so both stay uniform.
  typename Ring<Mainloop::kStages>::Cursor k_at{};   // K of the next block
  typename Ring<Mainloop::kStagesV>::Cursor v_at{};  // V of the current block
  /// A warpgroup that is alone waits for no turn.
  struct NoTurns {
    int warpgroup;
    CUTE_DEVICE void begin() const {}
    CUTE_DEVICE void await() const {}
    CUTE_DEVICE void pass() const {}
  };
  const std::conditional_t<(Mainloop::kWarpgroups > 1), Turns<Mainloop::kWarpgroups>, NoTurns> turns{warpgroup};
  BlockWalk walk;     // over the key blocks of the current tile, or over its steps
  int blocks_before;  // with fixed parts: of the sequence, before those of the walk
  ForwardWeigherSm90<Mainloop> weigher{params, shared, thread, warpgroup};
  ScaleOut opening = ScaleOut::Zero;  // the first P·V of a tile, or of a fixed part, overwrites what the last one left
};

}  // namespace flashtile
