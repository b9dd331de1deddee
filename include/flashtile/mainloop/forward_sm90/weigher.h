// This file has what consumers of Hopper's forward kernel do with the scores of a block: they turn them into weights.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/forward_sm90/block_mask.h"
#include "flashtile/mainloop/forward_sm90/descaled_weights.h"
#include "flashtile/mainloop/forward_sm90/fragments.h"
#include "flashtile/mainloop/forward_sm90/largest_logits.h"
#include "flashtile/mainloop/forward_sm90/long_sums.h"
#include "flashtile/mainloop/forward_sm90/pure_scores.h"
#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mask/walk.h"
#include "flashtile/math/round.h"

namespace flashtile {

/// ForwardWeigherSm90 is what one thread of the consumers has of its tile: the scores of a block, which it turns into
/// weights, and the output and the rows' state, which it rescales where weights ask for that. It starts no matmul, and
/// waits for none: ForwardConsumerSm90 does.
template <class Mainloop>
class ForwardWeigherSm90 {
  using Params = typename Mainloop::Params;
  using SharedStorage = typename Mainloop::SharedStorage;
  using Work = typename Mainloop::Work;
  using Fragments = ForwardFragmentsSm90<Mainloop>;
  static constexpr int kM = Mainloop::kM;
  static constexpr int kN = Mainloop::kN;

 public:
  CUTE_DEVICE ForwardWeigherSm90(Params const& params, SharedStorage& shared, int thread, int warpgroup)
      : params(params), shared(shared), thread(thread), warpgroup(warpgroup) {}

  CUTE_DEVICE Work& work() const { return shared.work[work_at.stage]; }
  CUTE_DEVICE void* staging() const { return shared.staging[thread / 32]; }

  /// Turns the raw scores of a step's block into scores, −inf where they do not count.
  CUTE_DEVICE void form_scores(BlockWalk const& walk, int step) {
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
  /// Its K is in the stage `k_stage`.
  template <bool kMayBeEdge>
  CUTE_DEVICE void look_at(BlockWalk const& walk, int step, int k_stage) {
    if constexpr (Mainloop::kScaled) {
      const auto of_block = shared.few.descales[k_stage];
      if (step == walk.first())
        descaled.begin(work().more.q_descales[warpgroup], of_block, softmax, params.forward.scores.map.unit_log2, maps);
      descaled.take(of_block, maps);
    }
    mask.template look_at<kMayBeEdge>(work(), walk, step, k_stage, first_row_of_warp());
  }

  /// Takes the references of the rows from the scores of a tile's, or a part's, first block.
  CUTE_DEVICE void begin() {
    softmax.begin(rows_and_columns(tSrS));
    if constexpr (Mainloop::kExchangesLargest) largest_logits().tell_references();
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
    if (kFirst) begin();
    if constexpr (Mainloop::kKeepsLargest) largest_logits().keep(rows_and_columns(tSrS));
    softmax.weigh(tSrS, tOrP, added, false);  // without a branch before it, it begins while P·V is waited for
    return accept(false);
  }

  /// Does what weigh() does for a tile that has_few_rows(), where the second row of each thread has no query. That row
  /// gets weights of 0, which take one exponential in all. This is for a lone warpgroup: it waits for its exponentials,
  /// as no other computes meanwhile.
  CUTE_DEVICE bool weigh_few_rows() {
    const auto exponents = [&](int i, float& a, float& b) {
      const bool first = i % 2 == 0;
      a = first ? fmaf(a, softmax.unit_log2, -softmax.offset[0]) : -kInfinity;
      b = first ? fmaf(b, softmax.unit_log2, -softmax.offset[0]) : -kInfinity;
    };
    softmax.weigh_by(exponents, tSrS, tOrP, added);
    return accept(false);
  }
  /// Returns whether no row of the tile from the ninth on has a query. A thread's second row is the eighth after its
  /// first.
  CUTE_DEVICE bool has_few_rows() const {
    return params.forward.scores.packing.query(work().tile.m_block * kM, 8) >= work().sequence.q.size;
  }

  /// Turn raw scores of an interior block into weights, and map them on the way, by softcap or by ALiBi. Where these
  /// return false, as weigh() does, or since a score is not near 0, as CappedExponents needs it, the scores stay raw.
  template <int kTerms>
  CUTE_DEVICE bool weigh_capped() {
    CappedExponents<kTerms> exponents{params.forward.scores.map, softmax.offset};
    softmax.weigh_by(exponents, tSrS, tOrP, added);
    return accept(exponents.far());
  }
  CUTE_DEVICE bool weigh_stretched(float slope, int step) {
    const auto tile = score_tile();
    const int first_column = work().keys.visited(step) * kN;
    const auto first = [&](int r) {
      return fmaf(-slope, tile.distance_of_first(tScS, r, first_column), -softmax.offset[r]);
    };
    softmax.weigh_by(StretchedExponents{params.forward.scores.map, slope, {first(0), first(1)}}, tSrS, tOrP, added);
    return accept(false);
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

  CUTE_DEVICE void drop(int n_block) {
    auto weights = cute::recast<std::uint32_t>(tOrP);
    DropoutTile<Rows::kQueries>(params.forward.dropout, work().tile.batch, work().tile.head, work().tile.m_block * kM,
                                mask.key(work(), n_block))
        .for_each(tScS, [&](int, int c, auto kept) { kept.keep_words(weights, c); });
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

  /// Makes the output and the rows' state of a finished tile what they are without descales.
  CUTE_DEVICE void descale(Work const& finished) {
    if constexpr (Mainloop::kScaled) {
      long_sums.add_to(staging(), tOrO);
      descaled.finish(softmax, rows_and_columns(tOrO), maps);
    }
    if constexpr (Mainloop::kWidens) {
      const float of_output[] = {finished.more.of_output, finished.more.of_output};
      scale_rows(rows_and_columns(tOrO), of_output);
      CUTE_UNROLL
      for (auto& row : softmax.row) row.reference *= finished.more.of_scores;
    }
  }

 private:
  /// Returns the first row of the thread's warp, counted among those of the head.
  CUTE_DEVICE int first_row_of_warp() const {
    return work().tile.m_block * kM + cute::get<0>(tScS(0, 0)) - thread % 32 / 4;
  }

  CUTE_DEVICE ScoreTile<HeadPacking> score_tile() const {
    return {params.forward.scores, work().tile, work().tile.m_block * kM, work().keys.lengths, &work().slope};
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

  Params const& params;
  SharedStorage& shared;
  const int thread;
  const int warpgroup;

 public:
  decltype(Fragments::places(0)) tScS = Fragments::places(thread);  // (row, column)
  decltype(Fragments::scores()) tSrS = Fragments::scores();         // (mma, m, n)
  decltype(Fragments::weights()) tOrP = Fragments::weights();       // (mma, m, k)
  decltype(Fragments::output()) tOrO = Fragments::output();         // (mma, m, head_dim)
  typename Ring<Mainloop::kWorks>::Cursor work_at{};                // current tile
  const bool maps = Mainloop::maps(params.forward.scores.map);
  const bool drops = Mainloop::kKnowsDropout && params.forward.dropout.active();
  typename Mainloop::Softmax softmax{params.forward.scores.map.unit_log2};
  [[no_unique_address]] std::conditional_t<Mainloop::kScaled, LongSums<Mainloop>, NoLongSums> long_sums;

 private:
  typename Mainloop::Softmax::Sums added;  // of the current block
  BlockMask<Mainloop> mask{params.forward, shared};
  [[no_unique_address]] std::conditional_t<Mainloop::kScaled, DescaledWeights<Mainloop>, NotDescaled> descaled;
};

}  // namespace flashtile
