// This mainloop takes one tile of query rows against all keys it sees, on mma.sync tensor cores (FlashAttention-2, Dao
// 2023).
//
// Split-Q: each warp owns whole rows of Q, so that softmax and P·V need no traffic between warps. K and V tiles pass
// through a ring buffer of shared-memory stages filled by cp.async; scores stay in registers, where they become the A
// operand of P·V.
//
// Where the threads are one warp they need no barrier of the thread block: several such warps may go through keys of
// their own. They are soon done, so the time counts in which their code is fetched into the instruction cache: the loop
// does the first loads, too, and no second copy of that code stands ahead of it.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/load/cp_async.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/keys_of_8_bits.h"
#include "flashtile/mainloop/operands.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mask/mask.h"
#include "flashtile/math/element.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/scheduler/single.h"
#include "flashtile/variant.h"

namespace flashtile {

/// `Source` knows where rows lie, and what the options make of scores:
///
///   Params                              has pointers, strides and options
///   kMayMap                             says whether scores may be mapped
///   load_q(sQ, thread)                  copies the tile's rows of Q
///   load_k(step, sK, thread)            copies the block of keys of a step
///   load_v(step, sV, thread)            copies the same block of values; the next step comes after that
///   scores(lengths)                     returns a ScoreTile, or its like, for this tile
///   visited(step)                       returns the block of a step, whose keys are the last that were loaded
///
/// Steps count from 0. Each visits a block of keys: the one of the same number, unless a Source knows better.
///
/// Where keys and values are of 8 bits, a Source has further:
///
///   prepare_queries(sQ, first_row, factors)       does what the function of that name does
///   descale_k(), descale_v()                      are what all keys, and all values, are multiplied with
///   load_descales_k(step, to), load_descales_v()  copy those of a block that has one for each row, and
///   has_descales_of_rows()                        says whether it does
template <Variant kV, class Source>
struct ForwardMainloopSm80 {
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr Features kFeatures = kV.features;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr bool kMayMap = Source::kMayMap;
  static constexpr int kStages = kV.stages;
  static constexpr int kThreads = kV.threads();
  // Of 8 rows a warp has all: see FewQueriesSm80.
  static constexpr bool kFew = kM == 8 && kV.warps == 1;
  static_assert(kV.head_dim_v == kHeadDim && (kFew || kM % (16 * kV.warps) == 0) && kN % 16 == 0 &&
                kHeadDim % 32 == 0 && kStages >= 2);

  using Stored = ElementOf<kV.dtype>;  // K and V in memory
  static constexpr bool kFp8 = kV.fp8();
  using Element = ElementOf16Bits<kV.dtype>;  // of the matmuls
  using MmaAtom = MmaAtomSm80<kFp8 ? DType::kFloat16 : kV.dtype>;
  using TiledMma =
      cute::TiledMMA<cute::MMA_Atom<MmaAtom>, cute::Layout<cute::Shape<cute::Int<kV.warps>, cute::_1, cute::_1>>,
                     cute::Tile<cute::Int<16 * kV.warps>, cute::_16, cute::_16>>;

  // A row of K and V has so many units of 16 bits: elements, or pairs of numbers of 8 bits.
  static constexpr int kUnits = kHeadDim / (kFp8 ? 2 : 1);

  // Rows have 128 bytes (64 where they are no multiple of that), and their 16-byte chunks are swizzled, so that the
  // eight rows of one ldmatrix lie in different banks.
  template <int kColumns>
  static constexpr int kAtomColumns = kColumns % 64 == 0 ? 64 : 32;
  template <int kColumns>
  using SmemAtom =
      decltype(cute::composition(cute::Swizzle<kAtomColumns<kColumns> == 64 ? 3 : 2, 3, 3>{},
                                 cute::Layout<cute::Shape<cute::_8, cute::Int<kAtomColumns<kColumns>>>,
                                              cute::Stride<cute::Int<kAtomColumns<kColumns>>, cute::_1>>{}));
  template <int kRows, int kColumns>
  using SmemTile =
      decltype(cute::tile_to_shape(SmemAtom<kColumns>{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));
  using SmemLayoutQ = SmemTile<kM, kHeadDim>;
  using SmemLayoutKV = SmemTile<kN, kUnits>;
  using SmemLayoutVt = decltype(cute::composition(
      SmemLayoutKV{},
      cute::Layout<cute::Shape<cute::Int<kUnits>, cute::Int<kN>>, cute::Stride<cute::Int<kN>, cute::_1>>{}));
  using VtFragmentLayout = cute::Layout<cute::Shape<cute::Int<kUnits>, cute::Int<kN>>>;  // its shape alone matters
  using Load = CpAsyncTile<Element, kAtomColumns<kHeadDim>, kThreads>;
  using LoadKV = CpAsyncTile<Element, kAtomColumns<kUnits>, kThreads>;

  static_assert(kM % Load::kRowsPerPass == 0 && kN % LoadKV::kRowsPerPass == 0);

  /// These are of numbers of 8 bits alone: what rows of scores, and, with descales of rows, their columns or those of
  /// weights have to be multiplied with.
  struct Factors {
    float of_queries[kM];
    float of_keys[kStages][kN];
  };
  struct Nothing {};
  struct SharedStorage : std::conditional_t<kFp8, Factors, Nothing> {
    alignas(128) Element q[kM * kHeadDim];
    alignas(128) Element ring[kStages][kN * kUnits];
  };

  // With four stages or more, one barrier serves K and V of a key tile; with fewer, each has its own.
  static constexpr int kStepsPerBarrier = kStages >= 4 ? 2 : 1;

  static constexpr int kRowsPerThread = kFew ? 2 : kM / (8 * kV.warps);
  using Softmax = OnlineSoftmax<kRowsPerThread, kFew ? Sharers::kOfQuads : Sharers::kQuad>;

  // For so many iterations the loop only loads, before it comes to the first block.
  static constexpr int kLoadedAhead = kThreads == 32 && kStepsPerBarrier == 2 ? kStages / 2 - 1 : 0;

  // Where registers allow, Q is read from shared memory once, not again for every key tile.
  static constexpr bool kKeepQ = kHeadDim <= 64;

  typename Source::Params const& params;
  SharedStorage& shared;
  TileCoord tile;
  VisibleKeys<kN> keys;
  int thread;
  Source source;

  /// Waits until what every thread has written or copied is there for all.
  CUTE_DEVICE static void sync() {
    if constexpr (kThreads == 32)
      __syncwarp();
    else
      __syncthreads();
  }

  // K and V tiles alternate through the ring: step 0 from a key tile is its K, step 1 its V, step 2 the next tile's K.
  static constexpr int kStepK = 0;
  static constexpr int kStepV = 1;

  template <int kStep>
  CUTE_DEVICE Element* stage(int n_block) const {
    return shared.ring[(2 * n_block + kStep) % kStages];
  }

  /// Returns the descales of the rows in that stage.
  template <int kStep>
  CUTE_DEVICE float* factors(int n_block) const {
    return shared.of_keys[(2 * n_block + kStep) % kStages];
  }

  template <int kStep>
  CUTE_DEVICE void load_step(int n_block) {
    using namespace cute;
    const int block = n_block + kStep / 2;
    if (block < keys.blocks) {
      Tensor to = make_tensor(make_smem_ptr(stage<kStep>(n_block)), SmemLayoutKV{});  // (N, units)
      if constexpr (kFp8) {
        if (source.has_descales_of_rows())
          source.template load_descales<kStep % 2 == kStepV>(block, factors<kStep>(n_block));
      }
      if constexpr (kStep % 2 == kStepK)
        source.load_k(block, to, thread);
      else
        source.load_v(block, to, thread);
    }
    cp_async_fence();
  }

  /// Returns the memory of K or V of a key tile, once it has landed. Every kStepsPerBarrier steps it waits for that
  /// many tiles and refills as many stages.
  template <int kStep>
  CUTE_DEVICE Element* acquire(int n_block) {
    using namespace cute;
    if constexpr (kStep % kStepsPerBarrier == 0) {
      cp_async_wait<kStages - 2 * kStepsPerBarrier>();
      sync();  // the tiles are visible to every warp, and no warp still reads those of the steps before
      for_each(make_int_sequence<kStepsPerBarrier>{},
               [&](auto i) { load_step<kStep + kStages - kStepsPerBarrier + i>(n_block); });
    }
    return stage<kStep>(n_block);
  }

  /// Turns the raw scores of a block into scores, −inf where the mask hides them.
  template <class Scores, class Coord>
  CUTE_DEVICE void map_and_mask(Scores& scores, Coord const& tScS, int n_block, bool maps, bool edge) const {
    // The asm hides the value from the compiler, which would compute what follows from it ahead of the loop, and hold
    // that in registers, of which there are too few.
    Lengths lengths = keys.lengths;
    asm volatile("" : "+r"(lengths.q));
    const auto score_tile = source.scores(lengths);
    if (maps) score_tile.template map<Softcaps::kAny>(scores, tScS, n_block * kN);
    if (edge) score_tile.mask(scores, tScS, n_block * kN);
  }

  /// Multiplies raw scores (row, column) of 8-bit keys with the factors of their rows, and with the descales of their
  /// columns where each has one.
  template <class Scores, class Coord>
  CUTE_DEVICE void descale_scores(Scores& scores, Coord const& tScS, int n_block,
                                  float const (&factor)[kRowsPerThread]) const {
    using namespace cute;
    scale_rows(scores, factor);
    if (!source.has_descales_of_rows()) return;
    for_column_pairs(tScS, factors<kStepK>(n_block), [&](int c, float2 descale) {
      CUTE_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) scores(r, c) *= descale.x, scores(r, c + 1) *= descale.y;
    });
  }

  /// Accumulates P·V of all visible keys into `tOrO` (mma, m, head_dim) and their weights into the softmax state.
  template <class Accumulator>
  CUTE_DEVICE void run(Accumulator& tOrO, Softmax& softmax) {
    using namespace cute;
    TiledMma mma;
    auto mma_thread = mma.get_slice(thread);
    auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
    auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
    auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, Element>{}, mma);
    auto copy_q_thread = copy_q.get_slice(thread);
    auto copy_k_thread = copy_k.get_slice(thread);
    auto copy_v_thread = copy_v.get_slice(thread);

    Tensor sQ = make_tensor(make_smem_ptr(shared.q), SmemLayoutQ{});  // (M, head_dim)
    Tensor tSsQ = copy_q_thread.partition_S(sQ);                      // (copy, m, k)
    Tensor tSrQ = mma_thread.partition_fragment_A(sQ);                // (mma, m, k)
    Tensor tSrQ_copy = copy_q_thread.retile_D(tSrQ);                  // (copy, m, k)
    Tensor cS = make_identity_tensor(Shape<Int<kM>, Int<kN>>{});      // (M, N)
    Tensor tScS = rows_and_columns(mma_thread.partition_C(cS));       // (row, column)
    Tensor rows_of_o = rows_and_columns(tOrO);                        // (row, head_dim)

    [[maybe_unused]] float query_factor[kRowsPerThread];
    [[maybe_unused]] DescaledValues values;
    const bool maps = kMayMap && params.scores.map.maps();
    bool drops = false;
    if constexpr (kKnowsDropout) drops = params.dropout.active();
    source.load_q(sQ, thread);
    if constexpr (kLoadedAhead == 0)
      for_each(make_int_sequence<kStages - kStepsPerBarrier>{}, [&](auto step) { load_step<step>(0); });

    CUTE_NO_UNROLL
    for (int n_block = -kLoadedAhead; n_block < keys.blocks; ++n_block) {
      const int visited = source.visited(n_block);
      Tensor sK = make_tensor(make_smem_ptr(acquire<kStepK>(n_block)), SmemLayoutKV{});  // (N, units)
      if (n_block < 0) continue;
      if constexpr (kFp8) {
        if (n_block == 0) {
          source.prepare_queries(sQ, thread / 32 * 16, shared.of_queries);
          CUTE_UNROLL
          for (int r = 0; r < kRowsPerThread; ++r)
            query_factor[r] = shared.of_queries[get<0>(tScS(r, 0))] * source.descale_k();
        }
      }
      if (kKeepQ && n_block == 0) copy(copy_q, tSsQ, tSrQ_copy);
      Tensor tSsK = copy_k_thread.partition_S(sK);         // (copy, n, k)
      Tensor tSrK = mma_thread.partition_fragment_B(sK);   // (mma, n, k)
      Tensor tSrK_copy = copy_k_thread.retile_D(tSrK);     // (copy, n, k)
      Tensor tSrS = partition_fragment_C(mma, shape(cS));  // (mma, m, n)
      clear(tSrS);
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tSrQ); ++k) {
        if (!kKeepQ) copy(copy_q, tSsQ(_, _, k), tSrQ_copy(_, _, k));
        if constexpr (kFp8) {
          if (k % 2 == 0) copy(copy_k, tSsK(_, _, k / 2), tSrK_copy(_, _, k / 2));
          Tensor wide = make_fragment_like(tSrK(_, _, k / 2));  // (mma, n)
          widen_keys<Stored>(tSrK(_, _, k / 2), k % 2, wide);
          gemm(mma, tSrQ(_, _, k), wide, tSrS);
        } else {
          copy(copy_k, tSsK(_, _, k), tSrK_copy(_, _, k));
          gemm(mma, tSrQ(_, _, k), tSrK(_, _, k), tSrS);
        }
      }

      Tensor scores = rows_and_columns(tSrS);  // (row, column)
      if constexpr (kFp8) descale_scores(scores, tScS, n_block, query_factor);
      const bool edge = keys.walk().is_edge(n_block);
      if (edge || maps) [[unlikely]]
        map_and_mask(scores, tScS, visited, maps, edge);
      float factor[kRowsPerThread];
      if (softmax.fit(scores, factor) && n_block > 0) [[unlikely]]  // the first block finds zeros
        scale_rows(rows_of_o, factor);

      Tensor sVt = make_tensor(make_smem_ptr(acquire<kStepV>(n_block)), SmemLayoutVt{});           // (units, N)
      Tensor tOsV = copy_v_thread.partition_S(sVt);                                                // (copy, units, k)
      Tensor tOrV = mma_thread.partition_fragment_B(make_tensor(sVt.data(), VtFragmentLayout{}));  // (mma, units, k)
      Tensor tOrV_copy = copy_v_thread.retile_D(tOrV);                                             // (copy, units, k)
      if constexpr (kFp8) {
        if (source.has_descales_of_rows()) {
          const float change = values.template begin<kN>(factors<kStepV>(n_block));
          if (change != 1) [[unlikely]] {
            CUTE_UNROLL
            for (int r = 0; r < kRowsPerThread; ++r) factor[r] = change;
            scale_rows(rows_of_o, factor);
          }
        }
      }
      array<array<typename DropoutTile<Rows::kQueries>::Columns, 2>, kRowsPerThread / 2> kept;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tOrV); ++k) {
        if constexpr (!kFp8) copy(copy_v, tOsV(_, _, k), tOrV_copy(_, _, k));
        Tensor tSrS_k = n16_block(tSrS, k);  // (mma, m, 2)
        softmax.exponentiate(rows_and_columns(tSrS_k));
        if constexpr (kFp8) {
          if (source.has_descales_of_rows())
            values.multiply(rows_and_columns(tSrS_k), factors<kStepV>(n_block) + 16 * k);
        }
        Tensor tOrP = as_operand_a<Element>(tSrS_k);  // (mma, m)
        if constexpr (kKnowsDropout) {
          static_assert(kN % 32 == 0);  // what stays is found for two k at once
          if (drops) {
            const DropoutTile<Rows::kQueries> drop(params.dropout, tile.batch, tile.head, tile.m_block * kM,
                                                   keys.key(visited));
            Tensor weights = recast<std::uint32_t>(tOrP);
            CUTE_UNROLL
            for (int r = 0; r < kRowsPerThread; r += 2) {
              if (k % 2 == 0) kept[r / 2] = drop.at(tScS, r, 4 * k);
              kept[r / 2][k % 2].keep_words(weights, 2 * r);
            }
          }
        }
        if constexpr (kFp8) {
          CUTE_UNROLL
          for (int n = 0; n < size<1>(tOsV); ++n) {  // 16 units at a time, which are 32 columns
            copy(copy_v, tOsV(_, n, k), tOrV_copy(_, n, k));
            Tensor wide = make_tensor<Element>(Shape<Shape<_2, _2>, _4>{});  // (mma, columns)
            widen_values<Stored>(n8_blocks<1, 2>(tOrV(_, _, k), n), wide);
            gemm(mma, tOrP, wide, n8_blocks<2, 4>(tOrO, n));
          }
        } else {
          gemm(mma, tOrP, tOrV(_, _, k), tOrO);
        }
      }
    }
    if constexpr (kFp8) {
      const float factor = source.has_descales_of_rows() ? values.unit : source.descale_v();
      CUTE_UNROLL
      for (int i = 0; i < size(tOrO); ++i) tOrO(i) *= factor;
    }
  }
};

}  // namespace flashtile
