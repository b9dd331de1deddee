// This file has the producer of Hopper's backward kernel of one pass: the thread that has TMA load tiles.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "flashtile/cuda/launch.h"
#include "flashtile/load/tma.h"
#include "flashtile/mainloop/backward_one_pass_sm90/scheduler.h"

namespace flashtile {

template <class Mainloop>
struct OnePassProducerSm90 {
  using SharedStorage = typename Mainloop::SharedStorage;
  using Element = typename Mainloop::Element;
  using Work = typename Mainloop::Work;
  using Blocks = OnePassBlocksSm90<Mainloop>;
  static constexpr int kM = Mainloop::kM;
  static constexpr int kN = Mainloop::kN;
  static constexpr int kHeadDim = Mainloop::kHeadDim;
  static constexpr int kColumns = Mainloop::kColumns;

  BackwardOnePassParams const& params;
  SharedStorage& shared;
  typename Ring<Mainloop::kStages>::Cursor at{};
  typename Ring<1>::Cursor keys_at{};

  CUTE_DEVICE void run(Blocks const& blocks) {
    blocks.for_each([&](Work const& work, auto) { load(work); });
  }

  CUTE_DEVICE void load(Work const& work) {
    if (work.empty()) return ask_for_next();
    int left = work.steps;
    // The next block is asked for early enough before this one's end for its tiles to be in flight by then.
    const int ask_at = min(left, Mainloop::kStepsAhead);
    const auto load_keys = [&](auto columns, CUtensorMap const& map, Ring<1>& ring, Element* to) {
      std::uint64_t* barrier = ring.fill(keys_at, [] { return sizeof(SharedStorage::k); });
      load_tile<kN, kHeadDim, columns>(map, barrier, to, work.k_rows(params.backward), work.n_block * kN, work.kv_head);
    };
    bool first = true;
    work.for_each_tile(params.backward, [&](int head, int m_block, bool edge) {
      const auto load_queries = [&](CUtensorMap const& map, std::uint64_t* barrier, Element* to) {
        load_tile<kM, kHeadDim, kColumns>(map, barrier, to, work.q_rows(params.backward), m_block * kM, head);
      };
      std::uint64_t* barrier = shared.q_barriers.fill(at, [&] {
        if constexpr (Mainloop::kMasked) shared.tiles[at.parity][at.stage] = {m_block, edge};
        return sizeof(SharedStorage::q[0]);
      });
      load_queries(params.q, barrier, shared.q[at.stage]);
      // This waits until the last block's K has been read.
      if (first) load_keys(cute::Int<Mainloop::kColumnsOfK>{}, params.k, shared.k_barriers, shared.k);
      barrier = shared.dout_barriers.fill(
          at, [] { return sizeof(SharedStorage::dout[0]) + sizeof(SharedStorage::statistics[0]); });
      load_queries(params.dout, barrier, shared.dout[at.stage]);
      if (first) {
        load_keys(cute::Int<kColumns>{}, params.v, shared.v_barriers, shared.v);
        await_kernel_before();  // which writes the statistics
      }
      cute::SM90_TMA_LOAD_2D::copy(
          &params.statistics, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
          shared.statistics[at.stage], work.workspace_tile(params.backward, head, m_block) * kM, 0);
      first = false;
      at.advance();
      if (left-- == ask_at) ask_for_next();
    });
    if (Mainloop::kLoops) keys_at.advance();
  }

 private:
  CUTE_DEVICE void ask_for_next() {
    if constexpr (Mainloop::kRagged) shared.next_asked.arrive();
  }
};

}  // namespace flashtile
