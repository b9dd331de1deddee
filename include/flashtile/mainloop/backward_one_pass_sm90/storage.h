// What all roles of Hopper's backward kernel of one pass know: the launch's parameters, tiles and matmuls, and shared
// memory.
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
  CUtensorMap dq;             // half a tile of the workspace
  int blocks;                 // of keys, of all heads
};

/// What a thread block takes: a block of keys; several, as its index says; or again and again the next that nobody has
/// taken, where sequences are ragged, or several are to be taken and sums are in order.
enum class Takes { kBlock, kBlocks, kNext };

/// Where a thread block takes several blocks of keys, the next one's tiles are on their way while dK and dV of the last
/// one are stored.
template <Variant kV, Takes kT>
struct BackwardOnePassSm90 {
  static constexpr Takes kTakes = kT;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr bool kKnowsSoftcap = kV.knows(Features::kSoftcap);
  static constexpr bool kLoops = kTakes != Takes::kBlock;
  static constexpr bool kRagged = kTakes == Takes::kNext;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kStages = kV.stages;
  static constexpr int kWarpgroups = 2;  // consumers
  // Of a thread: 504 among the three warpgroups. A producer that works out the next block of keys could do with 40.
  static constexpr int kRegisters = kM == 64 && kV.features == Features::kNone ? 232 : 240;
  static constexpr int kProducerRegisters = 504 - 2 * kRegisters;
  static_assert(kV.head_dim_v == kHeadDim && kHeadDim % 64 == 0 && kN == 64 * kWarpgroups && kM % 16 == 0 &&
                kV.warps == 4 * (kWarpgroups + 1));

  using Element = ElementOf<kV.dtype>;
  static constexpr int kColumns = 64;  // of one TMA box
  using SmemLayoutdS = SmemTile<Element, kM, kN, 2>;
  using PlacesOfdS = decltype(cute::as_position_independent_swizzle_layout(SmemLayoutdS{}));  // in elements

  static constexpr auto kMajorK = cute::SM90::GMMA::Major::K;
  static constexpr auto kMajorMN = cute::SM90::GMMA::Major::MN;
  using Keys = cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>;
  using MmaS = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float,
                                       cute::Shape<cute::Int<kN>, cute::Int<kM>, cute::Int<kHeadDim>>>(),
      Keys{}));  // S, dP
  using MmaKV = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<
          Element, Element, float, cute::Shape<cute::Int<kN>, cute::Int<kHeadDim>, cute::Int<kM>>, kMajorK, kMajorMN>(),
      Keys{}));  // dV, dK
  // Of dQ a warpgroup has half the rows. Where rows are too few to share, dQ is formed transposed, (head_dim, M), and a
  // warpgroup has half the head dimension.
  static constexpr bool kTurned = kM < 64 * kWarpgroups;
  static_assert((kTurned ? kHeadDim : kM) == 64 * kWarpgroups);
  using ShapeQ = cute::Shape<cute::Int<kTurned ? kHeadDim : kM>, cute::Int<kTurned ? kM : kHeadDim>, cute::Int<kN>>;
  using MmaQ = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float, ShapeQ, kTurned ? kMajorMN : kMajorK,
                                       kTurned ? kMajorK : kMajorMN>(),
      Keys{}));
  // Whether dS takes the rounded weights, where there are no registers for the others.
  static constexpr bool kRoundedWeights = kM * kHeadDim > 64 * 128;
  static_assert(!kRoundedWeights || !kKnowsSoftcap);            // softcap scales them
  static constexpr int kPartOfQ = kM * kHeadDim / kWarpgroups;  // floats of one warpgroup
  static constexpr int kColumnsOfPart = 256;                    // as TMA sees them
  static constexpr int kRowsOfPart = kPartOfQ / kColumnsOfPart;
  static_assert(kPartOfQ % kColumnsOfPart == 0);

  using Work = KeyBlock<kM, kN, kRagged>;

  static constexpr int kStepsAhead = kStages + 2;  // so long before a block's end the next may be handed out

  struct SharedStorage {
    alignas(1024) Element k[kN * kHeadDim];
    alignas(1024) Element v[kN * kHeadDim];
    alignas(1024) Element q[kStages][kM * kHeadDim];
    alignas(1024) Element dout[kStages][kM * kHeadDim];
    alignas(1024) Element ds[2][kM * kN];
    alignas(1024) float dq[kWarpgroups][kPartOfQ];
    alignas(128) float statistics[kStages][2][kM];  // lse_log2, delta
    // What is handed out next, if it is: to the producer, the writers, and all consumers.
    Work work;
    bool more;  // or there is nothing left
    Ring<1> work_barriers;
    Ring<1> k_barriers, v_barriers;
    Ring<kStages> q_barriers, dout_barriers;
    // dS: all warps store their part and read all parts.
    cutlass::arch::ClusterBarrier ds_full[2], ds_empty[2];
    // A warpgroup's part of dQ: its warps fill the place, the writer empties it.
    cutlass::arch::ClusterBarrier dq_full[kWarpgroups], dq_empty[kWarpgroups];

    /// By one thread, before any other touches the barriers.
    CUTE_DEVICE void init_barriers() {
      work_barriers.init(1 + kWarpgroups + 128 * kWarpgroups);  // the producer, writers, and consumers
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
