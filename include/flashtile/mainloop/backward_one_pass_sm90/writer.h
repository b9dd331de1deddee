// This file has the writers of Hopper's backward kernel of one pass: the threads that have TMA add up dQ in memory, or
// store it where it is whole.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "flashtile/load/tma.h"
#include "flashtile/mainloop/backward_one_pass_sm90/scheduler.h"
#include "flashtile/mainloop/sum_of_dq.h"

namespace flashtile {

/// One thread for each consumer warpgroup has TMA add that warpgroup's part of dQ to memory, or store it.
template <class Mainloop>
struct OnePassWriterSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;
  using Work = typename Mainloop::Work;
  using Blocks = OnePassBlocksSm90<Mainloop>;

  BackwardOnePassParams const& params;
  SharedStorage& shared;
  int warpgroup;
  unsigned parity = 0;
  typename Ring<Mainloop::kStages>::Cursor at{};  // under a column mask, of the tile that is added next

  CUTE_DEVICE void run(Blocks const& blocks) {
    const bool wanted = params.backward.dq != nullptr;
    if (!Mainloop::kRagged && !wanted) return;
    blocks.for_each([&](Work const& work, auto release) {
      if constexpr (Mainloop::kWhole)
        store(work);
      else if (wanted)
        add(work);
      release();  // the scheduler waits for the writers, too
    });
  }

  CUTE_DEVICE void store(Work const& work) {
    using Element = typename Mainloop::Element;
    constexpr int kRows = Mainloop::kStagedRows, kColumns = Mainloop::kStagedColumns;
    constexpr int kPerBox = Mainloop::kColumnsOfStaged;
    constexpr bool kHalvesRows = kColumns == Mainloop::kHeadDim;
    const TmaRows rows = TmaRows::dense(work.batch);
    work.for_each([&](int head, int m_block) {
      const int row = m_block * Mainloop::kM + (kHalvesRows ? warpgroup * kRows : 0);
      const int first_column = kHalvesRows ? 0 : warpgroup * kColumns;
      auto* const staged = reinterpret_cast<Element*>(shared.dq[warpgroup]);
      shared.dq_full[warpgroup].wait(parity);
      CUTE_UNROLL
      for (int column = 0; column < kColumns; column += kPerBox)
        cute::SM90_TMA_STORE_5D::copy(&params.dq, staged + column * kRows, first_column + column, head,
                                      rows.position(row), rows.batch, rows.way_back);
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();  // TMA has read it from shared memory
      shared.dq_empty[warpgroup].arrive();
      parity ^= 1;
    });
  }

  CUTE_DEVICE void add(Work const& work) {
    if constexpr (Mainloop::kMasked) {
      if (work.empty()) return;
      int m_block = work.first_masked_tile(params.backward);
      work.for_each([&](int head, int) __attribute__((always_inline)) {
        add(work, head, m_block);
        // Consumers form dQ of a tile when they have begun with the next one: so the producer has written that.
        at.advance();
        keep_order();
        m_block = shared.tiles[at.parity][at.stage].index;
      });
    } else {
      work.for_each([&](int head, int m_block) __attribute__((always_inline)) { add(work, head, m_block); });
    }
  }

  /// Adds the part of dQ of one tile, when it is there.
  CUTE_DEVICE void add(Work const& work, int head, int m_block) {
    const std::int64_t tile = work.workspace_tile(params.backward, head, m_block);
    const SumOfDq sum(params.backward, tile, warpgroup);
    const bool in_order = params.backward.deterministic;
    // This is asked early, before dQ is there: almost always there is a sum already, and nobody waits for the answer.
    const bool there = !in_order && sum.there();
    const int turn = in_order ? work.turn(params.backward, m_block) : 0;
    shared.dq_full[warpgroup].wait(parity);  // waits for the warpgroup's warps to store their dQ
    const bool first = in_order ? sum.await(turn) : !there && sum.claim();
    if (!first) asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA sees what others had it write
    const int place = int((tile * Mainloop::kWarpgroups + warpgroup) * Mainloop::kRowsOfPart);
    if (first)
      cute::SM90_TMA_STORE_2D::copy(&params.dq, shared.dq[warpgroup], 0, place);
    else
      cute::SM90_TMA_REDUCE_ADD_2D::copy(&params.dq, shared.dq[warpgroup], 0, place);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // TMA has read it from shared memory
    shared.dq_empty[warpgroup].arrive();
    if (first || in_order) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // TMA has written it to global memory
      in_order ? sum.pass(turn) : sum.announce();
    }
    parity ^= 1;
  }
};

}  // namespace flashtile
