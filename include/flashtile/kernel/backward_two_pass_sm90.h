// The backward kernel of wide heads for Hopper has two passes: one over blocks of keys forms dK and dV, and one over
// tiles of queries forms dQ. They need nothing of each other, so they are one kernel, in which the pass of shorter
// pieces of work fills the tail of the other. No sum is shared between thread blocks: the results are the same in every
// run.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>

#include "flashtile/backward_order.h"
#include "flashtile/cuda/constants.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/epilogue/gradient.h"
#include "flashtile/epilogue/partial_gradient.h"
#include "flashtile/join_gradients.h"
#include "flashtile/load/tensor_map.h"
#include "flashtile/mainloop/backward_keys_sm90.h"
#include "flashtile/mainloop/backward_queries_sm90.h"
#include "flashtile/mainloop/hand_out.h"
#include "flashtile/params.h"
#include "flashtile/prepare_backward.h"
#include "flashtile/scheduler/sections.h"

namespace flashtile {

/// There are as many persistent thread blocks as run at a time. Each takes the next block of keys that no other has
/// taken, again and again, and when there are none left, tiles of queries, or, with kQueriesFirst, those first. The
/// tiles of the next one are being loaded while the gradients of the last one are stored.
template <Variant kV, bool kRagged, bool kQueriesFirst, bool kMasked>
struct BackwardTwoPassSm90 {
  using OfKeys = BackwardKeysSm90<kV, kRagged, kMasked>;
  using OfQueries = BackwardQueriesSm90<kV, kRagged, kMasked>;
  using Element = typename OfKeys::Element;
  using KeyBlock = typename OfKeys::Work;
  using QueryTile = BackwardParams::QueryTile;
  static constexpr int kConsumers = 256;             // consumer threads
  static constexpr int kTakePart = 32 + kConsumers;  // and those of the producer warp
  // Three threads, one of each warpgroup, have 504 registers together. Consumers need less than 240, producers more
  // than 24.
  static constexpr int kRegisters = 232;
  static constexpr int kProducerRegisters = 504 - 2 * kRegisters;

  struct SharedStorage {
    union {  // tiles of one pass, then of the other
      typename OfKeys::Tiles key_tiles;
      typename OfQueries::Tiles query_tiles;
    };
    typename OfKeys::Barriers key_barriers;
    typename OfQueries::Barriers query_barriers;
    HandOut<KeyBlock> key_blocks;
    HandOut<QueryTile> queries;

    /// One thread calls it before any other touches the barriers.
    CUTE_DEVICE void init_barriers() {
      key_barriers.init();
      query_barriers.init();
      key_blocks.init(kTakePart);
      queries.init(kTakePart);
      cutlass::arch::fence_barrier_init();
    }
  };
  static_assert(kV.warps == 12 && sizeof(SharedStorage) <= backward_shared_memory(kV));

  BackwardTwoPassParams const& params;
  SharedStorage& shared;

  /// One thread finds the work of both passes and hands it out.
  CUTE_DEVICE void hand_out() const {
    BackwardParams const& backward = params.backward;
    int key_blocks = params.key_blocks, query_tiles = params.query_tiles;
    if constexpr (kRagged) {
      await_kernel_before();                           // which writes the lists
      if (!kMasked || backward.ragged_keys.given()) {  // with a column mask, dense batches come here, too
        key_blocks = min(key_blocks, *backward.ragged_keys.listed * backward.heads_k * backward.parts.value);
        query_tiles = min(query_tiles, *backward.ragged_queries.listed * backward.heads);
      }
    }
    const int before_keys = kQueriesFirst ? query_tiles : 0;
    const int before_queries = kQueriesFirst ? 0 : key_blocks;
    int index = blockIdx.x;
    const auto next = [&] {
      await_kernel_before();  // which clears the counter
      index = gridDim.x + atomicAdd(backward.taken, 1);
    };
    const auto find_query_tile = [&](int place, QueryTile& tile) {
      if constexpr (!kRagged) {
        const int heads = backward.batch * backward.heads;
        const auto found = BlockOfSection::at(unsigned(place), heads, backward.m_blocks, params.heads_at_once);
        place = found.head * backward.m_blocks + found.rank;
      }
      return backward.find_query_tile(place, tile);
    };
    in_order(
        [&] {
          shared.key_blocks.run(
              [&](KeyBlock& block) {
                return index - before_keys < key_blocks && block.find(backward, index - before_keys);
              },
              next);
        },
        [&] {
          shared.queries.run(
              [&](QueryTile& tile) {
                return index - before_queries < query_tiles && find_query_tile(index - before_queries, tile);
              },
              next);
        },
        [] {});
  }

  /// The producer warp has TMA load the tiles of both passes.
  CUTE_DEVICE void produce() const {
    in_order(
        [&]() __attribute__((always_inline)) {
          typename OfKeys::Producer producer{params, shared.key_tiles, shared.key_barriers};
          shared.key_blocks.for_each([&](KeyBlock const& block, KeyBlock const&) __attribute__((always_inline)) {
            producer.run(block, [&] { shared.key_blocks.ask(); });
          });
        },
        [&]() __attribute__((always_inline)) {
          typename OfQueries::Producer producer{params, shared.query_tiles, shared.query_barriers};
          shared.queries.for_each([&](QueryTile const& tile, QueryTile const&) __attribute__((always_inline)) {
            producer.run(typename OfQueries::Work(params.backward, tile), [&] { shared.queries.ask(); });
          });
        },
        [&] { change_passes(); });
  }

  /// The threads from the second warpgroup on are the consumers.
  CUTE_DEVICE void consume() const {
    in_order([&]() __attribute__((always_inline)) { form_keys(); },
             [&]() __attribute__((always_inline)) { form_queries(); }, [&] { change_passes(); });
  }

 private:
  /// Calls what a thread does in each pass, in their order, and `between` the two. Where the order was known at run
  /// time alone, descriptors were not in uniform registers, and the passes spilled.
  template <class OfKeyBlocks, class OfQueryTiles, class Between>
  CUTE_DEVICE void in_order(OfKeyBlocks&& of_key_blocks, OfQueryTiles&& of_query_tiles, Between&& between) const {
    if constexpr (kQueriesFirst) {
      of_query_tiles();
      between();
      of_key_blocks();
    } else {
      of_key_blocks();
      between();
      of_query_tiles();
    }
  }

  /// Between the passes the producer warp and all consumers wait for each other, as the tiles of the second pass lie
  /// where those of the first were.
  CUTE_DEVICE void change_passes() const {
    __syncwarp();
    cutlass::arch::fence_view_async_shared();  // TMA next writes memory that threads have written
    cutlass::arch::NamedBarrier::sync(kTakePart, 0);
  }

  /// Forms dK and dV of all blocks of keys, each by a warpgroup.
  CUTE_DEVICE void form_keys() const {
    BackwardParams const& backward = params.backward;
    const int thread = threadIdx.x % 128;
    if (threadIdx.x / 128 == 1) {
      typename OfKeys::Values values{backward, shared.key_tiles, shared.key_barriers, thread};
      form_keys<typename OfKeys::MmaV, OfKeys::kHeadDimV>(
          values, backward.dropout.scale, backward.dv, backward.dv_strides, backward.partial_dv, backward.head_dim_v);
    } else {
      typename OfKeys::Keys keys{backward, shared.key_tiles, shared.key_barriers, thread};
      form_keys<typename OfKeys::MmaK, OfKeys::kHeadDim>(keys, backward.scale, backward.dk, backward.dk_strides,
                                                         backward.partial_dk, backward.head_dim);
    }
  }

  /// Forms dK or dV of all blocks of keys, by the warpgroup of `consumer`.
  template <class Mma, int kColumns, class Consumer>
  CUTE_DEVICE void form_keys(Consumer& consumer, float scale, void* gradient, Strides const& strides, float* partial,
                             int columns) const {
    using namespace cute;
    shared.key_blocks.for_each([&](KeyBlock const& block, KeyBlock const& kept) __attribute__((always_inline)) {
      Tensor acc = partition_fragment_C(Mma{}, Shape<Int<OfKeys::kN>, Int<kColumns>>{});
      clear(acc);
      consumer.run(block, acc);
      if (gradient == nullptr) return;
      if (partial != nullptr)
        return store_partial<OfKeys::kN, kColumns, Mma>(
            acc, partial, kept.place, kept.span_of_keys(params.backward).used - kept.n_block * OfKeys::kN, columns,
            consumer.thread);
      const auto head = GradientHead<Element>::of(gradient, strides, kept.batch, kept.kv_head,
                                                  kept.span_of_keys(params.backward), columns);
      scale_gradient(acc, scale);
      store_gradient<OfKeys::kN, Mma, kRagged>(acc, head, kept.n_block * OfKeys::kN, consumer.thread);
    });
  }

  /// Forms dQ of all tiles of queries, by both warpgroups of consumers.
  CUTE_DEVICE void form_queries() const {
    using namespace cute;
    using Mma = typename OfQueries::MmaQ;
    BackwardParams const& backward = params.backward;
    const int thread = threadIdx.x - 128;
    typename OfQueries::Consumer consumer{backward, params.scores_of_queries, shared.query_tiles, shared.query_barriers,
                                          thread};
    shared.queries.for_each([&](QueryTile const& tile, QueryTile const&) __attribute__((always_inline)) {
      Tensor acc = partition_fragment_C(Mma{}, Shape<Int<OfQueries::kM>, Int<OfQueries::kHeadDim>>{});
      clear(acc);
      consumer.run(typename OfQueries::Work(backward, tile), acc);
      const auto head = GradientHead<Element>::of(backward.dq, backward.dq_strides, tile.batch, tile.head,
                                                  tile.sequence.q, backward.head_dim);
      scale_gradient(acc, backward.scale);
      store_gradient<OfQueries::kM, Mma, kRagged>(acc, head, tile.m_block * OfQueries::kM, thread);
    });
  }
};

template <class Row, bool kRagged, bool kQueriesFirst, bool kMasked = false>
__global__ void __launch_bounds__(Row::kVariant.threads(), 1)
    backward_two_pass_sm90(const __grid_constant__ BackwardTwoPassParams params) {
  using Passes = BackwardTwoPassSm90<Row::kVariant, kRagged, kQueriesFirst, kMasked>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Passes::SharedStorage*>(shared_bytes);
  if (threadIdx.x / 32 == 3) prefetch_constants(params);
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.k));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.v));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.dout));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.statistics));
    shared.init_barriers();
  }
  __syncthreads();  // all threads wait for the barriers' initialisation
  let_next_kernel_start();

  // While rows are being prepared, the first tiles are on their way. Each role waits for that kernel where it first
  // needs what it writes.
  const Passes passes{params, shared};
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Passes::kProducerRegisters>();
    if (threadIdx.x < 32)
      passes.produce();
    else if (threadIdx.x == 32)
      passes.hand_out();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Passes::kRegisters>();
    await_kernel_before();
    passes.consume();
  }
}

template <class Row>
void launch_backward_two_pass_sm90(const BackwardPlan& plan, const BackwardTensors& tensors, void* memory,
                                   Stream stream) {
  using OfKeys = BackwardKeysSm90<Row::kVariant, true>;
  static KernelHandles keys_first, queries_first, of_ragged, masked;
  const bool ragged = plan.problem.ragged;
  const Device device = plan.problem.device;
  BackwardParams backward = BackwardParams::of(plan, tensors, memory);
  backward.deterministic = false;  // it always is, as no two thread blocks add to the same dQ
  const BackwardWorkspace& workspace = backward.workspace;
  constexpr int kRows = 64;
  const BackwardTwoPassParams params{
      .backward = backward,
      .scores_of_queries = backward.scores.transposed(),
      .q = head_tiles(tensors.forward.q, kRows, OfKeys::kColumns, ragged),
      .k = head_tiles(tensors.forward.k, kRows, OfKeys::kColumns, ragged),
      .v = head_tiles(tensors.forward.v, kRows, OfKeys::kColumns, ragged),
      .dout = head_tiles(tensors.dout, kRows, OfKeys::kColumns, ragged),
      .statistics = float_boxes(workspace.lse_log2(memory), 2, workspace.rows(), 2, kRows, device),
      .key_blocks = backward.dk || backward.dv ? static_cast<int>(plan.tiles - workspace.tiles) : 0,
      .query_tiles = backward.dq ? static_cast<int>(workspace.tiles) : 0,
      .heads_at_once = query_heads_at_once(plan.problem, plan.heads_at_once),
  };
  if (plan.problem.column_masked())
    find_mask_tables(backward.mask_tables, plan.variant, backward.columns, plan.problem, backward.sequences, {},
                     stream);
  prepare_backward(plan, backward, stream);
  const LaunchShape shape = {std::min(plan.grid, params.key_blocks + params.query_tiles), Row::kVariant.threads(),
                             plan.shared_memory, true};
  if (plan.problem.column_masked()) {
    if constexpr (Row::kVariant.may_mask_backward())
      launch(backward_two_pass_sm90<Row, true, false, true>, masked, device, shape, params, stream);
  } else if (ragged)
    launch(backward_two_pass_sm90<Row, true, false>, of_ragged, device, shape, params, stream);
  else if (queries_come_first(plan.problem, Row::kVariant, plan.parts))
    launch(backward_two_pass_sm90<Row, false, true>, queries_first, device, shape, params, stream);
  else
    launch(backward_two_pass_sm90<Row, false, false>, keys_first, device, shape, params, stream);
  join_gradients(plan, backward, stream);
}

}  // namespace flashtile
