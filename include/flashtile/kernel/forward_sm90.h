// The forward kernel for Hopper has one persistent thread block per multiprocessor. One, two or three of its warpgroups
// are consumers; one more has the producers, a few threads (over pages, warps), and the scheduler, a warp that hands
// out tiles, and perhaps a warp that exchanges the largest logits; and over keys of 8 bits the last one widens them.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>

#include "flashtile/begin_max_logits.h"
#include "flashtile/cuda/constants.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/epilogue/direct.h"
#include "flashtile/epilogue/partial.h"
#include "flashtile/epilogue/staged.h"
#include "flashtile/epilogue/sum_of_parts.h"
#include "flashtile/forward_memory.h"
#include "flashtile/join_parts.h"
#include "flashtile/load/tensor_map.h"
#include "flashtile/mainloop/forward_sm90.h"
#include "flashtile/order_tiles.h"
#include "flashtile/params.h"

namespace flashtile {

template <class Row, Keys kKeys, Maps kMaps>
__global__ void __launch_bounds__(Row::kVariant.threads(), 1)
    forward_sm90(const __grid_constant__ typename ForwardMainloopSm90<Row::kVariant, kKeys, kMaps>::Params params) {
  using namespace cute;
  using Mainloop = ForwardMainloopSm90<Row::kVariant, kKeys, kMaps>;
  constexpr int kWarpgroups = Mainloop::kWarpgroups;
  // Consumers get the registers that the producer gives up of the launch's, 168 or 128 a thread: to ask for one more
  // would wait for ever.
  constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : Mainloop::kRegisters == 240 ? 24 : 40;
  constexpr int kWidenerRegisters = 56, kWidenerWarpgroups = Mainloop::kWideners / 4;
  // Two warpgroups have as many registers as threads can have.
  constexpr bool kGivesRegisters = kWarpgroups > 1;
  constexpr int kLaunchRegisters = kWarpgroups + kWidenerWarpgroups == 2 ? 168 : 128;
  static_assert(!kGivesRegisters ||
                kProducerRegisters + kWidenerWarpgroups * kWidenerRegisters + kWarpgroups * Mainloop::kRegisters <=
                    (1 + kWidenerWarpgroups + kWarpgroups) * kLaunchRegisters);
  static_assert(sizeof(typename Mainloop::SharedStorage) <=
                (Mainloop::kMasked ? Mainloop::kMemory.masked_bytes : Mainloop::kMemory.bytes));

  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Mainloop::SharedStorage*>(shared_bytes);
  const int warp = threadIdx.x / 32;
  ForwardSchedulerSm90<Mainloop> scheduler{params, shared};
  if (threadIdx.x == 0) shared.init_barriers();
  if (warp == 2) prefetch_constants(params);
  if (params.forward.scores.packing.has_idle_rows() && threadIdx.x >= 128)
    shared.clear_q(threadIdx.x - 128, Row::kVariant.threads() - 128);
  if (threadIdx.x == 96) {
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.q));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.k));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.v));
    if (Mainloop::kMemory.staged) prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.out));
  }
  // All threads wait for the barriers' initialisation. The scheduler's warp finds the first tile meanwhile, and keeps
  // no producer waiting: so their code is in the instruction cache when that tile is there. (Consumers do wait for it,
  // as they need the registers that it gives up; but their first operands come later still.)
  constexpr int kThreads = Row::kVariant.threads();
  constexpr unsigned kForScheduler = 3, kForOthers = 4;  // named barriers that Turns leaves
  if (warp == 1) {
    scheduler.prepare();
    __syncwarp();
    cutlass::arch::NamedBarrier::sync(64, kForScheduler);
    scheduler.hand_out_prepared();
  } else {
    __syncwarp();
    if (warp == 0) cutlass::arch::NamedBarrier::arrive(64, kForScheduler);
    cutlass::arch::NamedBarrier::sync(kThreads - 32, kForOthers);
  }

  if (threadIdx.x < 128) {
    if constexpr (kGivesRegisters) cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (warp == 1) scheduler.run();
    if constexpr (Mainloop::kScaled) {
      if (warp >= 2) ValueTransposerSm90<Mainloop>{shared, warp - 2}.run();
    } else {
      if (threadIdx.x == 96) QueryProducerSm90<Mainloop>{params, shared}.run();
    }
    if constexpr (Mainloop::kHasExchange) {
      if (warp == 2) LargestLogitsExchange<Mainloop>{params.forward, shared}.run();
    }
    if constexpr (Mainloop::kOverPages) {
      if (warp == 0) PagesProducerSm90<Mainloop>{params, shared}.run_keys();
      if (warp == 2) PagesProducerSm90<Mainloop>{params, shared}.run_values();
    } else {
      if (threadIdx.x == 0) ForwardProducerSm90<Mainloop>{params, shared}.run();
    }
  } else if (Mainloop::kWidens && threadIdx.x >= 128 * (1 + kWarpgroups)) {
    if constexpr (Mainloop::kWidens) {
      cutlass::arch::warpgroup_reg_dealloc<kWidenerRegisters>();
      KeyWidenerSm90<Mainloop>{params, shared, int(threadIdx.x % 128)}.run();
    }
  } else {
    if constexpr (kGivesRegisters) cutlass::arch::warpgroup_reg_alloc<Mainloop::kRegisters>();
    const int thread = threadIdx.x - 128;
    Tensor cO = make_identity_tensor(Shape<Int<Mainloop::kM>, Int<Mainloop::kHeadDimV>>{});        // (M, head_dim)
    Tensor tOcO = rows_and_columns(typename Mainloop::MmaPV{}.get_slice(thread).partition_C(cO));  // (row, head_dim)
    using Work = typename Mainloop::Work;
    const auto sinks_of = [&](Work const& work) {
      return sinks_of_rows<Mainloop::kFeatures>(params.forward, work.tile, tOcO);
    };
    const auto ask = [&](Work const& work) {
      // With a tile come all tables that join_parts() reads, so it may start, and finds its rows while this kernel
      // goes on. On an H200 that took 3 to 6 % off short calls of up to 64 rows, and added 1 to 4 % to those of 128
      // and more, for which it starts when parts are stored, in finish().
      if constexpr (Mainloop::kSplits) {
        constexpr int kFewRows = 64;
        if (work.sequence.q.size * params.forward.scores.packing.heads <= kFewRows) let_next_kernel_start();
      }
      return sinks_of(work);
    };
    const auto finish_softmax = [&](Work const& work, typename Mainloop::Softmax& softmax, auto const& sinks) {
      return finish_rows<Mainloop::kFeatures>(params.forward, work.tile, work.sequence.q, tOcO, softmax, sinks,
                                              work.tile.m_block * Mainloop::kM);
    };
    const auto store = [&](Work const& work, auto& tOrO) {
      const int first_row = work.tile.m_block * Mainloop::kM;
      Tensor rows = rows_and_columns(tOrO);
      const auto store_as = [&](auto element) {
        using Element = decltype(element);
        if constexpr (Mainloop::kMemory.staged) {
          const int warp = thread / 32;
          stage_and_store_rows<typename Mainloop::SmemLayoutO, Mainloop::kColumnsO>(
              params.forward, params.out, work.tile, work.sequence.q, rows,
              reinterpret_cast<Element*>(shared.staging[warp]), first_row + Mainloop::kRowsOfWarp * warp);
        } else {
          store_rows<Element>(params.forward, work.tile, work.sequence.q, rows, tOcO, first_row);
        }
      };
      if constexpr (Mainloop::kScaled) {
        if (params.out_is_half) return store_as(cutlass::half_t{});
      }
      store_as(typename Mainloop::OutElement{});
    };
    // With fixed parts, this is the result over those before the current one.
    [[maybe_unused]] const auto first_part = [](Work const& work) {
      return work.keys.key(0) / (Mainloop::kN * Mainloop::kBlocksOfPart);
    };
    [[maybe_unused]] const auto last_part = [](Work const& work) {
      return work.keys.key(work.keys.blocks - 1) / (Mainloop::kN * Mainloop::kBlocksOfPart);
    };
    auto sum_of_parts = [&] {
      if constexpr (Mainloop::kFixedParts && !Mainloop::kSplits)
        return SumOfParts<Mainloop>(params.parts, shared.staging[thread / 32]);
      else
        return 0;
    }();
    const auto end_part = [&](Work const& work, int part, auto& tOrO, typename Mainloop::Softmax& softmax) {
      if constexpr (Mainloop::kSplits)
        store_part<Mainloop::kM>(params.forward, work.tile.m_block, work.sequence.q, work.part + part,
                                 rows_and_columns(tOrO), tOcO, softmax);
      else if constexpr (Mainloop::kFixedParts)
        sum_of_parts.add(part == first_part(work), tOrO, softmax);
    };
    const auto finish = [&](Work const& work, auto& tOrO, typename Mainloop::Softmax& softmax, auto const& sinks) {
      if constexpr (Mainloop::kSplits) {
        let_next_kernel_start();
        softmax.finish_sums();
        end_part(work, Mainloop::kFixedParts ? last_part(work) : 0, tOrO, softmax);
      } else {
        if constexpr (Mainloop::kFixedParts) {
          if (first_part(work) != last_part(work)) sum_of_parts.finish(tOrO, softmax);
        }
        scale_rows(rows_and_columns(tOrO), finish_softmax(work, softmax, sinks));
        // The sum of no part and one, by which join_parts() begins, has no −0.
        if constexpr (Mainloop::kFixedParts) cute::transform(tOrO, [](float x) { return x + 0.0f; });
        store(work, tOrO);
      }
    };
    const auto skip = [&](Work const& work) {
      typename Mainloop::Softmax nothing(params.forward.scores.map.unit_log2);
      const auto sinks = sinks_of(work);
      if constexpr (!Mainloop::kSplits) finish_softmax(work, nothing, sinks);
      Tensor zeros = partition_fragment_C(typename Mainloop::MmaPV{}, shape(cO));
      clear(zeros);
      if constexpr (!Mainloop::kSplits)
        store(work, zeros);
      else if constexpr (!Mainloop::kFixedParts)
        finish(work, zeros, nothing, sinks);
    };
    ForwardConsumerSm90<Mainloop>{params, shared, thread}.run(ask, end_part, finish, skip);
    if (Mainloop::kMemory.staged) tma_store_wait<0>();  // shared memory must outlive TMA's reads of it
  }
}

/// Makes the parameters of a launch. `key_rows` is how many rows a TMA box of keys has.
template <class Mainloop>
ForwardParamsSm90 forward_params_sm90(const ForwardPlan& plan, const ForwardTensors& tensors, void* memory,
                                      int key_rows = Mainloop::kN) {
  const bool ragged = plan.problem.ragged, keys_in_line = ragged || Mainloop::kOverPages;
  return {
      .forward = ForwardParams::of(plan, tensors, memory),
      .q = head_tiles(tensors.q, plan.packing.rows_of_box(Mainloop::kM / Mainloop::kWarpgroups), Mainloop::kColumns,
                      ragged, plan.packing),
      .k = head_tiles(tensors.k, key_rows, Mainloop::kColumnsOfStoredK, keys_in_line),
      .v = head_tiles(tensors.v, key_rows, Mainloop::kColumnsOfStoredV, keys_in_line),
      .out = Mainloop::kMemory.staged
                 ? head_tiles(tensors.out, Mainloop::kRowsOfWarp, Mainloop::kColumnsO, ragged, plan.packing)
                 : CUtensorMap{},
      .scheduler = ragged ? PersistentScheduler{} : *plan.scheduler,
      .order = ragged ? TileOrder{} : TileOrder::of(*plan.scheduler),
      .taken = (ragged || plan.problem.column_masked()) && !plan.lists
                   ? MarkedCount{static_cast<std::uint64_t*>(memory), MarkedCount::new_mark()}
                   : MarkedCount{},
  };
}

/// Launches the kernel for keys in rows or in pages, with those that the plan needs before and after it.
template <class Row, Keys kKeys, class Params>
void launch_forward_sm90(const ForwardPlan& plan, const Params& params, Stream stream) {
  static KernelHandles plain, mapped, split, masked;
  const Device device = plan.problem.device;
  const LargestScores& largest = params.forward.rows.largest;
  if (largest.wanted()) begin_max_logits(largest, plan.problem.batch, device, stream);
  const bool early = largest.wanted() || plan.problem.ragged || plan.problem.column_masked();
  const LaunchShape shape{plan.grid, Row::kVariant.threads(), plan.shared_memory, early};
  if (plan.lists) order_tiles(params.forward.sequences, params.forward.ragged, device, stream);
  if constexpr (Row::kVariant.may_mask() && kKeys == Keys::kInRows) {
    if (plan.problem.column_masked()) {
      ForwardParams const& forward = params.forward;
      const TilesAtOnce at_once{params.scheduler.heads_at_once, plan.grid};
      find_mask_tables(forward.mask_tables, plan.variant, forward.columns, plan.problem, forward.sequences, at_once,
                       stream);
      constexpr Maps kMaps = Row::kVariant.maps_masked() ? Maps::kAsAsked : Maps::kNever;
      return launch(forward_sm90<Row, Keys::kMasked, kMaps>, masked, device, shape, params, stream);
    }
  }
  if constexpr (Row::kVariant.may_split() && kKeys != Keys::kLastMasked) {
    if (plan.splits > 1) {
      launch(forward_sm90<Row, kKeys | Keys::kSplit, Maps::kAsAsked>, split, device, shape, params, stream);
      return join_parts(plan, params.forward, stream);
    }
  }
  // Most calls map no scores. A call between others waits for the instructions that it jumps over, too: so where keys
  // are whole, those calls have kernels of their own. Rows under a mask of the last keys map none, see has_rows().
  constexpr bool kInPages = are(kKeys, Keys::kInPages), kWidens = are(kKeys, Keys::kE4M3) || are(kKeys, Keys::kE5M2);
  if constexpr (kKeys != Keys::kLastMasked) {
    constexpr Maps kMaps = Row::kVariant.fp8() || kInPages ? Maps::kAsAsked : Maps::kAlways;
    if (kWidens || params.forward.scores.map.maps())
      return launch(forward_sm90<Row, kKeys, kMaps>, mapped, device, shape, params, stream);
  }
  if constexpr (!kWidens) launch(forward_sm90<Row, kKeys, Maps::kNever>, plain, device, shape, params, stream);
}

template <class Row>
void launch_forward_sm90(const ForwardPlan& plan, const ForwardTensors& tensors, void* memory, Stream stream) {
  using Mainloop = ForwardMainloopSm90<Row::kVariant>;
  const ForwardParamsSm90 params = forward_params_sm90<Mainloop>(plan, tensors, memory);
  if constexpr (Mainloop::kScaled) {
    const Problem& p = plan.problem;
    const ScaledForwardParamsSm90 scaled = {params, Descales::of(tensors.q_descale, p.seqlen_q, p.heads_q),
                                            Descales::of(tensors.k_descale, p.seqlen_k, p.heads_k),
                                            Descales::of(tensors.v_descale, p.seqlen_k, p.heads_k),
                                            p.out_dtype == DType::kFloat16};
    launch_forward_sm90<Row, Keys::kInRows>(plan, scaled, stream);
  } else {
    launch_forward_sm90<Row, Keys::kInRows>(plan, params, stream);
  }
}

}  // namespace flashtile
