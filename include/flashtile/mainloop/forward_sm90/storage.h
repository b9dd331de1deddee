// What all roles of Hopper's forward kernel know: the launch's parameters, tiles and matmuls, and shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cache.h"
#include "flashtile/cuda/barrier.h"
#include "flashtile/cuda/marked_count.h"
#include "flashtile/load/tma.h"
#include "flashtile/math/element.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/math/visible_keys.h"
#include "flashtile/params.h"
#include "flashtile/scheduler/few_sequences.h"
#include "flashtile/scheduler/persistent.h"
#include "flashtile/variant.h"

namespace flashtile {

struct ForwardParamsSm90 {
  ForwardParams forward;
  CUtensorMap q, k, v, out;  // tiles of M, N, N rows; of the output as the epilogue stores them
  PersistentScheduler scheduler;
  MarkedCount taken;  // of a few ragged sequences, tiles asked for so far, after the first of each thread block
};

/// Over keys and values in pages: all rows of them stand one behind the other, and a box holds rows of one page.
struct PagedForwardParamsSm90 : ForwardParamsSm90 {
  Pages pages;
  int rows_of_box;  // divides a page and a tile
};

template <Variant kV, bool kPaged = false>
struct ForwardMainloopSm90 {
  using Params = std::conditional_t<kPaged, PagedForwardParamsSm90, ForwardParamsSm90>;
  static constexpr bool kOverPages = kPaged;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr Features kFeatures = kV.features;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr int kHeadDimV = kV.head_dim_v;
  static constexpr int kStages = kV.stages / 2;  // key blocks, each a tile of K and one of V
  static constexpr int kWarpgroups = kM / 64;    // consumers
  static constexpr ForwardMemorySm90 kMemory = ForwardMemorySm90::of(kV);
  static constexpr int kStagesQ = kMemory.stages_q;
  static_assert(kV.warps == 4 * (kWarpgroups + 1) && kV.stages % 2 == 0 && kM % 64 == 0 && kN % 16 == 0 &&
                kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);

  using Element = ElementOf<kV.dtype>;
  using ShapeQK = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kHeadDim>>;
  using ShapePV = cute::Shape<cute::Int<kM>, cute::Int<kHeadDimV>, cute::Int<kN>>;
  using Warpgroups = cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>;

  // Where registers allow, Q comes from them: that spares a fifth of the reads of shared memory, and power with them.
  static constexpr int kRegisters = kWarpgroups == 2 ? 240 : 160;                           // of a consumer
  static constexpr int kRegistersOfTiles = kHeadDimV / 2 + kHeadDim / 4 + kN / 2 + kN / 4;  // O, Q, S, P
  static constexpr bool kKeepQ = kRegistersOfTiles <= kRegisters * 5 / 6;
  static constexpr auto op_qk() {
    using namespace cute::SM90;
    if constexpr (kKeepQ)
      return GMMA::rs_op_selector<Element, Element, float, ShapeQK>();
    else
      return GMMA::ss_op_selector<Element, Element, float, ShapeQK>();
  }
  using MmaQK = decltype(cute::make_tiled_mma(op_qk(), Warpgroups{}));
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<Element, Element, float, ShapePV, cute::SM90::GMMA::Major::K,
                                       cute::SM90::GMMA::Major::MN>(),
      Warpgroups{}));

  // Columns of one TMA box: 128 bytes, 64 where the head dimension is no multiple of 64.
  static constexpr int columns_per_box(int head_dim) { return head_dim % 64 == 0 ? 64 : 32; }
  static constexpr int kColumns = columns_per_box(kHeadDim);
  static constexpr int kColumnsV = columns_per_box(kHeadDimV);
  template <int kColumnsPerBox>
  using AtomK = std::conditional_t<kColumnsPerBox == 64, cute::SM90::GMMA::Layout_K_SW128_Atom<Element>,
                                   cute::SM90::GMMA::Layout_K_SW64_Atom<Element>>;
  using AtomMN = std::conditional_t<kColumnsV == 64, cute::SM90::GMMA::Layout_MN_SW128_Atom<Element>,
                                    cute::SM90::GMMA::Layout_MN_SW64_Atom<Element>>;
  using SmemLayoutQ = decltype(cute::tile_to_shape(
      AtomK<kColumns>{}, cute::Shape<cute::Int<kM>, cute::Int<kHeadDim>, cute::Int<kStagesQ>>{}));
  using SmemLayoutK = decltype(cute::tile_to_shape(
      AtomK<kColumns>{}, cute::Shape<cute::Int<kN>, cute::Int<kHeadDim>, cute::Int<kStages>>{}));
  // V as the matmul sees it, (head_dim, N): the same memory as (N, head_dim) rows.
  using SmemLayoutVt =
      decltype(cute::tile_to_shape(AtomMN{}, cute::Shape<cute::Int<kHeadDimV>, cute::Int<kN>, cute::Int<kStages>>{},
                                   cute::Step<cute::_2, cute::_1, cute::_3>{}));

  // Blocks that need no mask have a loop of their own, where registers allow a third copy of the step.
  static constexpr bool kPeelInterior = kHeadDimV < 192;

  static constexpr int kRowsOfWarp = 16;  // of the output, as it is staged
  using SmemLayoutO =
      decltype(cute::tile_to_shape(AtomK<kColumnsV>{}, cute::Shape<cute::Int<kRowsOfWarp>, cute::Int<kHeadDimV>>{}));
  static constexpr int kStagingWarps = kMemory.staged ? kM / kRowsOfWarp : 1;
  static constexpr int kStagingPerWarp = kMemory.staged ? kRowsOfWarp * kHeadDimV : 8;  // next to nothing where unused

  /// What is told of a tile. No key block at all: its rows see nothing. Fewer: there are no more tiles.
  struct Work {
    TileCoord tile;
    int kv_head;
    Sequence sequence;
    TmaRows q_rows, k_rows;
    VisibleKeys<kN> keys;
  };
  // A tile stays in use until the next one has begun. Of ragged sequences none is handed out until so many key blocks
  // of the one before are left to load: what is handed out nobody else can take.
  static constexpr int kWorks = 4;
  static constexpr int kBlocksAhead = kStages + 3;

  struct SharedStorage {
    alignas(1024) Element q[kStagesQ][kM * kHeadDim];
    alignas(1024) Element k[kStages][kN * kHeadDim];
    alignas(1024) Element v[kStages][kN * kHeadDimV];
    alignas(1024) Element staging[kStagingWarps][kStagingPerWarp];
    Work work[kWorks];
    FewSequences few;
    Ring<kWorks> work_barriers;
    cutlass::arch::ClusterBarrier near_end;  // of a tile's loads: the producer arrives, a ragged scheduler waits
    Ring<kStagesQ> q_barriers[kWarpgroups];  // of each one's rows
    Ring<kStages> k_barriers, v_barriers;

    /// By one thread, before any other touches the barriers.
    CUTE_DEVICE void init_barriers() {
      work_barriers.init(128 * kWarpgroups + 1);
      near_end.init(1);
      CUTE_UNROLL
      for (auto& barriers : q_barriers) barriers.init(kKeepQ ? 128 : 4);
      k_barriers.init(4 * kWarpgroups);
      v_barriers.init(4 * kWarpgroups);
      cutlass::arch::fence_barrier_init();
    }
  };
  using Softmax = OnlineSoftmax<2>;
};

}  // namespace flashtile
