// This file has what all roles of Hopper's backward kernel of one pass know: the launch's parameters, tiles and
// matmuls, and shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/barrier.h"
#include "flashtile/load/tensor_map.h"
#include "flashtile/mainloop/key_block.h"
#include "flashtile/mainloop/wgmma.h"
#include "flashtile/math/element.h"
#include "flashtile/params.h"
#include "flashtile/variant.h"

namespace flashtile {

struct BackwardOnePassParams {
  BackwardParams backward;
  CUtensorMap q, k, v, dout;  // tiles of M, N, N, M rows
  CUtensorMap statistics;     // lse_log2 and delta of M rows
  CUtensorMap dq;             // half a tile of the workspace, or, where dQ is whole, of dQ itself
  CUtensorMap dk, dv;         // a warp's rows; where a thread block takes one block of keys
  int blocks;                 // blocks of keys of all heads
};

/// Takes says what a thread block takes: a block of keys; several, as its index says; or again and again the next that
/// no other has taken, where sequences are ragged, or where it takes several and sums are in order, or their work is
/// not even; under a column mask, too, with a kernel of its own. A block whose sums may be in order has a kernel of its
/// own, as the registers that this takes made narrow heads 3 % slower where they are not.
enum class Takes { kBlock, kBlockInOrder, kBlocks, kNext, kNextMasked };

/// Contributes says what a block of keys forms of dQ: a part, which is added to what others form of it, or the whole,
/// where it is the only block of its head and every tile of queries sees it. The whole is rounded and stored at once.
enum class Contributes { kPart, kWhole };

/// Where a thread block takes several blocks of keys, the tiles of the next one are being loaded while dK and dV of the
/// last one are stored.
template <Variant kV, Takes kT, Contributes kC = Contributes::kPart>
struct BackwardOnePassSm90 {
  static constexpr Takes kTakes = kT;
  static constexpr bool kWhole = kC == Contributes::kWhole;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr bool kKnowsSoftcap = kV.knows(Features::kSoftcap);
  static constexpr bool kLoops = kTakes != Takes::kBlock && kTakes != Takes::kBlockInOrder;
  static constexpr bool kMasked = kTakes == Takes::kNextMasked;
  static constexpr bool kRagged = kTakes == Takes::kNext || kMasked;
  static constexpr bool kKnowsOrder = kTakes != Takes::kBlock && kTakes != Takes::kBlocks;  // see go_in_rounds()
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kStages = kV.stages;
  static constexpr int kWarpgroups = 2;  // consumer warpgroups
  // Three threads, one of each warpgroup, have 504 registers together. A producer that finds its next block by itself
  // could do with 40.
  static constexpr int kRegisters = kM == 64 && kV.features == Features::kNone ? 232 : 240;
  static constexpr int kProducerRegisters = 504 - 2 * kRegisters;
  static_assert(kV.head_dim_v == kHeadDim && kHeadDim % 32 == 0 && kN == 64 * kWarpgroups && kM % 16 == 0 &&
                kV.warps == 4 * (kWarpgroups + 1));

  using Element = ElementOf<kV.dtype>;
  static constexpr int kColumns = columns_per_box(kHeadDim);
  using SmemLayoutdS = SmemTile<Element, kM, kN, 2>;
  using SmemLayoutGradient = decltype(cute::tile_to_shape(typename SwizzledAtoms<Element, kColumns>::K{},
                                                          cute::Shape<cute::Int<kN>, cute::Int<kHeadDim>>{}));
  using PlacesOfdS = decltype(cute::as_position_independent_swizzle_layout(SmemLayoutdS{}));  // offsets in elements

  static constexpr auto kMajorK = cute::SM90::GMMA::Major::K;
  static constexpr auto kMajorMN = cute::SM90::GMMA::Major::MN;
  using Keys = cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>;
  using MmaS = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float,
                                       cute::Shape<cute::Int<kN>, cute::Int<kM>, cute::Int<kHeadDim>>>(),
      Keys{}));  // S, and dP where V is not in registers
  // Where enough registers are free, V is in them while a block of keys lasts: dP then reads half as much of shared
  // memory.
  static constexpr bool kKeepsV = kHeadDim == 96;
  using MmaP = std::conditional_t<
      kKeepsV,
      decltype(cute::make_tiled_mma(
          cute::SM90::GMMA::rs_op_selector<Element, Element, float,
                                           cute::Shape<cute::Int<kN>, cute::Int<kM>, cute::Int<kHeadDim>>>(),
          Keys{})),
      MmaS>;
  using MmaKV = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<
          Element, Element, float, cute::Shape<cute::Int<kN>, cute::Int<kHeadDim>, cute::Int<kM>>, kMajorK, kMajorMN>(),
      Keys{}));  // dV, dK
  // Each warpgroup forms half the rows of dQ. Where rows are too few to share, it forms half the head dimension: dQ is
  // formed transposed (turned), (head_dim, M), or, where a half is no multiple of 64, by columns.
  static constexpr bool kTurned = kM < 64 * kWarpgroups && kHeadDim == 64 * kWarpgroups;
  static constexpr bool kByColumns = kM < 64 * kWarpgroups && !kTurned;
  static_assert((kTurned ? kHeadDim : kM) == (kByColumns ? 64 : 64 * kWarpgroups));
  using ShapeQ = cute::Shape<cute::Int<kTurned ? kHeadDim : kM>, cute::Int<kTurned ? kM : kHeadDim>, cute::Int<kN>>;
  static constexpr int kWidthQ = cute::get<1>(ShapeQ{}) / (kByColumns ? kWarpgroups : 1);  // of a warpgroup's matmul
  using Columns = cute::Layout<cute::Shape<cute::_1, cute::Int<kWarpgroups>, cute::_1>>;
  using MmaQ = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float,
                                       cute::Shape<cute::_64, cute::Int<kWidthQ>, cute::Int<kN>>,
                                       kTurned ? kMajorMN : kMajorK, kTurned ? kMajorK : kMajorMN>(),
      std::conditional_t<kByColumns, Columns, Keys>{}));
  // By columns, each warpgroup reads half of K's boxes, so these are narrow enough for their number to be even.
  static constexpr int kColumnsOfK = kByColumns ? 16 : kColumns;
  // With this, dS is formed of the rounded weights, as there are no registers for the others.
  static constexpr bool kRoundedWeights = kM * kHeadDim > 64 * 128;
  static_assert(!kRoundedWeights || !kKnowsSoftcap);            // softcap scales the others
  static constexpr int kPartOfQ = kM * kHeadDim / kWarpgroups;  // floats of dQ that one warpgroup forms: a part
  static constexpr int kColumnsOfPart = 256;                    // columns and rows of a part as TMA sees it
  static constexpr int kRowsOfPart = kPartOfQ / kColumnsOfPart;
  static_assert(kPartOfQ % kColumnsOfPart == 0);
  // Where dQ is whole, a part of it is staged as rows: half of the tile's, or half of their columns.
  static constexpr int kStagedRows = kTurned || kByColumns ? kM : kM / kWarpgroups;
  static constexpr int kStagedColumns = kPartOfQ / kStagedRows;
  static constexpr int kColumnsOfStaged = kByColumns ? 16 : kColumns;  // of a box
  static_assert(kStagedColumns % kColumnsOfStaged == 0);
  using SmemLayoutStaged =
      decltype(cute::tile_to_shape(typename SwizzledAtoms<Element, kColumnsOfStaged>::K{},
                                   cute::Shape<cute::Int<kStagedRows>, cute::Int<kStagedColumns>>{}));

  using Work = KeyBlock<kM, kN, kRagged, kKnowsOrder, true, kMasked ? ColumnMasks::kAlways : ColumnMasks::kNever>;

  static constexpr int kStepsAhead = kStages + 2;  // iterations before a block's end when the next may be handed out

  struct SharedStorage {
    alignas(1024) Element k[kN * kHeadDim];
    alignas(1024) Element v[kN * kHeadDim];
    alignas(1024) Element q[kStages][kM * kHeadDim];
    alignas(1024) Element dout[kStages][kM * kHeadDim];
    alignas(1024) Element ds[2][kM * kN];
    alignas(1024) float dq[kWarpgroups][kPartOfQ];  // whole ones are staged here rounded, as Element
    alignas(128) float statistics[kStages][2][kM];  // lse_log2, delta; they come and go with dO
    // These are this block and the next one, in turn, where blocks are handed out: the producer, the writers and all
    // consumers wait for one; the scheduler waits until the producer asks for the next, and until the others have done
    // reading the last but one.
    Work work[2];
    bool more[2];  // false if no block is left
    // Under a column mask these are the tiles of queries in the stages, of this round and of the one before, which the
    // writers still add to.
    MaskedBlocksAround::Block tiles[2][kMasked ? kStages : 1];
    Ring<2> work_barriers;
    cutlass::arch::ClusterBarrier next_asked;
    // Consumers wait for tiles that the producer has TMA load; it waits for all their warps to have read a stage.
    Ring<1> k_barriers, v_barriers;
    Ring<kStages> q_barriers, dout_barriers;
    // For dS, all consumer warps wait until each has stored its part (full), and before they store again, until each
    // has read all parts (empty).
    cutlass::arch::ClusterBarrier ds_full[2], ds_empty[2];
    // For a warpgroup's part of dQ, the writer waits for the warps to store it (full), and they wait for the writer's
    // TMA to have read it (empty).
    cutlass::arch::ClusterBarrier dq_full[kWarpgroups], dq_empty[kWarpgroups];

    /// One thread calls it before any other touches the barriers.
    CUTE_DEVICE void init_barriers() {
      work_barriers.init(kWarpgroups + 128 * kWarpgroups);  // writers and consumers
      next_asked.init(1);
      k_barriers.init(4 * kWarpgroups);
      v_barriers.init(4 * kWarpgroups);
      q_barriers.init(4 * kWarpgroups);
      dout_barriers.init(4 * kWarpgroups);
      CUTE_UNROLL
      for (int b = 0; b < 2; ++b) {
        ds_full[b].init(4 * kWarpgroups);
        ds_empty[b].init(4 * kWarpgroups);
      }
      CUTE_UNROLL
      for (int w = 0; w < kWarpgroups; ++w) {
        dq_full[w].init(4);
        dq_empty[w].init(1);
      }
      cutlass::arch::fence_barrier_init();
    }
  };
};

}  // namespace flashtile
