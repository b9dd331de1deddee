// One block of keys against all queries that see it, on mma.sync tensor cores: dK and dV of the block, and its part of
// dQ (FlashAttention-2, Dao 2023).
//
// Everything is transposed: tiles of scores are (keys, queries), and each warp owns 16 or more whole keys. So the
// weights and their gradients, which lie in registers as a matmul left them, are what the next matmul takes for dV and
// dK, and only dQ, a sum over keys, needs them in shared memory. Where head dimensions are too wide for the
// accumulators of dK and dV, several warps share their keys: they divide the queries of the scores and the columns of
// dK and dV, and P and dS both pass through shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/load/cp_async.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/key_block.h"
#include "flashtile/mainloop/operands.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mainloop/sum_of_dq.h"
#include "flashtile/params.h"
#include "flashtile/variant.h"

namespace flashtile {

template <Variant kV>
struct BackwardMainloopSm80 {
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kStages = kV.stages;
  static constexpr int kThreads = kV.threads();
  static_assert(kV.head_dim_v == kHeadDim && kHeadDim % 32 == 0 && (kStages == 1 || kStages == 2));

  /// How many of the warps stand along `rows` of a product with `columns`: 32 rows to a warp, for which it reads fewer
  /// operands than for 16, unless that leaves the others less than 16 columns.
  static constexpr int warps_along(int rows, int columns) {
    for (const int of_warp : {32, 16}) {
      const int along = rows / of_warp;
      if (along >= 1 && along <= kV.warps && columns % (16 * (kV.warps / along)) == 0) return along;
    }
    return kV.warps;
  }
  static constexpr int kWarpsOfKeys = warps_along(kN, kM);
  static constexpr int kSharers = kV.warps / kWarpsOfKeys;  // warps that share their keys
  static constexpr bool kShareP = kSharers > 1;
  // The sums of dQ leave while other warps are still at dK, where that pays (docs/performance.md).
  static constexpr bool kAddUnderdK = kShareP && kStages == 2 && kHeadDim <= 128 && !kV.every_option;
  static constexpr int kWarpsOfQueries = warps_along(kM, kHeadDim);  // for dQ
  static_assert(kN % (16 * kWarpsOfKeys) == 0 && kM % (16 * kSharers) == 0 && kM % (16 * kWarpsOfQueries) == 0 &&
                kHeadDim % (16 * kSharers) == 0 && kHeadDim % (16 * (kV.warps / kWarpsOfQueries)) == 0);

  using Element = std::conditional_t<kV.dtype == DType::kFloat16, cute::half_t, cute::bfloat16_t>;
  using MmaAtom = std::conditional_t<kV.dtype == DType::kFloat16, cute::SM80_16x8x16_F32F16F16F32_TN,
                                     cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  template <int kWarpsM, int kWarpsN>
  using MmaOf = cute::TiledMMA<cute::MMA_Atom<MmaAtom>,
                               cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>>,
                               cute::Tile<cute::Int<16 * kWarpsM>, cute::Int<16 * kWarpsN>, cute::_16>>;
  using Mma = MmaOf<kWarpsOfKeys, kSharers>;                        // S, dP, dV, dK: rows are keys
  using MmaQ = MmaOf<kWarpsOfQueries, kV.warps / kWarpsOfQueries>;  // dQ

  // Swizzled as in the forward.
  template <int kRows, int kColumns>
  using SmemLayout = decltype(cute::tile_to_shape(
      cute::composition(cute::Swizzle<kColumns % 64 == 0 ? 3 : 2, 3, 3>{},
                        cute::Layout<cute::Shape<cute::_8, cute::Int<kColumns % 64 == 0 ? 64 : 32>>,
                                     cute::Stride<cute::Int<kColumns % 64 == 0 ? 64 : 32>, cute::_1>>{}),
      cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));
  /// The same memory with rows and columns exchanged.
  template <int kRows, int kColumns>
  using SmemLayoutT = decltype(cute::composition(
      SmemLayout<kRows, kColumns>{},
      cute::Layout<cute::Shape<cute::Int<kColumns>, cute::Int<kRows>>, cute::Stride<cute::Int<kRows>, cute::_1>>{}));
  using Load = CpAsyncTile<Element, kHeadDim % 64 == 0 ? 64 : 32, kThreads>;
  static_assert(kM % Load::kRowsPerPass == 0 && kN % Load::kRowsPerPass == 0);

  struct SharedStorage {
    alignas(128) Element k[kN * kHeadDim];
    alignas(128) Element v[kN * kHeadDim];
    alignas(128) Element q[kStages][kM * kHeadDim];
    alignas(128) Element dout[kStages][kM * kHeadDim];
    alignas(128) Element scores[kShareP ? 2 : 1][kN * kM];  // dS, P
    alignas(16) float lse_log2[kStages][kM];
    alignas(16) float delta[kStages][kM];
  };

  using Work = KeyBlock<kM, kN, true>;

  BackwardParams const& params;
  SharedStorage& shared;
  Work const& work;
  int thread;

  template <class Layout, class Memory>
  CUTE_DEVICE static auto tile(Memory* memory) {
    return cute::make_tensor(cute::make_smem_ptr(memory), Layout{});
  }

  using RowMajor = cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>;     // operands whose k runs along memory
  using ColumnMajor = cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>;  // and those where it does not

  /// acc += A · Bᵀ for B (N, K) in shared memory; `load_a(k)` makes a piece of A ready, which `a(k)` then is. Operands
  /// are on their way while the piece before them is multiplied.
  template <class TiledMma, class AtomB, class LoadA, class A, class SharedB, class Accumulator>
  CUTE_DEVICE void multiply(LoadA&& load_a, A&& a, SharedB const& sB, Accumulator& acc) const {
    using namespace cute;
    TiledMma mma;
    const auto copy_b = make_tiled_copy_B(AtomB{}, mma);
    const auto copy_b_thread = copy_b.get_slice(thread);
    Tensor tCsB = copy_b_thread.partition_S(sB);  // (copy, n, k)
    Tensor tCrB =
        mma.get_slice(thread).partition_fragment_B(make_tensor(sB.data(), product_each(shape(sB))));  // (mma, n, k)
    Tensor tCrB_copy = copy_b_thread.retile_D(tCrB);                                                  // (copy, n, k)
    const auto load = [&](int k) {
      load_a(k);
      copy(copy_b, tCsB(_, _, k), tCrB_copy(_, _, k));
    };
    load(0);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrB); ++k) {
      if (k + 1 < size<2>(tCrB)) load(k + 1);
      gemm(mma, a(k), tCrB(_, _, k), acc);
    }
  }

  /// acc += A · Bᵀ for A (M, K) and B (N, K) in shared memory.
  template <class TiledMma, class AtomA, class AtomB, class SharedA, class SharedB, class Accumulator>
  CUTE_DEVICE void multiply_shared(SharedA const& sA, SharedB const& sB, Accumulator& acc) const {
    using namespace cute;
    TiledMma mma;
    const auto copy_a = make_tiled_copy_A(AtomA{}, mma);
    const auto copy_a_thread = copy_a.get_slice(thread);
    Tensor tCsA = copy_a_thread.partition_S(sA);  // (copy, m, k)
    Tensor tCrA =
        mma.get_slice(thread).partition_fragment_A(make_tensor(sA.data(), product_each(shape(sA))));  // (mma, m, k)
    Tensor tCrA_copy = copy_a_thread.retile_D(tCrA);                                                  // (copy, m, k)
    multiply<TiledMma, AtomB>([&](int k) { copy(copy_a, tCsA(_, _, k), tCrA_copy(_, _, k)); },
                              [&](int k) { return tCrA(_, _, k); }, sB, acc);
  }

  /// acc += A · Bᵀ where A is accumulators, to be rounded.
  template <Negative kNegative, class Scores, class SharedB, class Accumulator>
  CUTE_DEVICE void multiply_scores(Scores& scores, SharedB const& sB, Accumulator& acc) const {
    multiply<Mma, ColumnMajor>([](int) {},
                               [&](int k) {
                                 auto block = n16_block(scores, k);
                                 return as_operand_a<Element, kNegative>(block);
                               },
                               sB, acc);
  }

  template <Negative kNegative, class Scores>
  CUTE_DEVICE void store_scores(Scores const& scores, Element* to) const {
    using namespace cute;
    Tensor rounded = make_fragment_like<Element>(scores);
    round_to<kNegative>(scores, rounded);
    const auto copy_c =
        make_tiled_copy_C(Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<32>, Element>{}, Mma{}).get_slice(thread);
    copy(AutoVectorizingCopyWithAssumedAlignment<32>{}, copy_c.retile_S(rounded),
         copy_c.partition_D(tile<SmemLayout<kN, kM>>(to)));
  }

  /// A place among the tiles of queries that see a key: all those of the group's first head, then of its second, …
  struct Step {
    int head;
    int m_block;
  };

  /// Place of a tile's rows in the workspace, in tiles.
  CUTE_DEVICE std::int64_t tile_of(Step step) const { return work.workspace_tile(params, step.head, step.m_block); }

  CUTE_DEVICE void load_keys() const {
    const Span span = work.sequence.k;
    const int keys = span.used - work.n_block * kN;
    const int key = span.first + work.n_block * kN;
    Load::load(head_tile<kN, kHeadDim, Element>(params.k, params.k_strides, work.batch, work.kv_head, key),
               tile<SmemLayout<kN, kHeadDim>>(shared.k), keys, params.head_dim, thread);
    Load::load(head_tile<kN, kHeadDim, Element>(params.v, params.v_strides, work.batch, work.kv_head, key),
               tile<SmemLayout<kN, kHeadDim>>(shared.v), keys, params.head_dim_v, thread);
  }

  CUTE_DEVICE void load_queries(Step step, int stage) const {
    const Span span = work.sequence.q;
    const int rows = span.used - step.m_block * kM;
    const int row = span.first + step.m_block * kM;
    Load::load(head_tile<kM, kHeadDim, Element>(params.q, params.q_strides, work.batch, step.head, row),
               tile<SmemLayout<kM, kHeadDim>>(shared.q[stage]), rows, params.head_dim, thread);
    Load::load(head_tile<kM, kHeadDim, Element>(params.dout, params.dout_strides, work.batch, step.head, row),
               tile<SmemLayout<kM, kHeadDim>>(shared.dout[stage]), rows, params.head_dim_v, thread);
    constexpr int kPieces = kM / 4;  // of 16 bytes
    static_assert(2 * kPieces <= kThreads);
    if (thread < 2 * kPieces) {
      const int piece = thread % kPieces * 4;
      const bool is_lse = thread < kPieces;
      const float* from = is_lse ? params.workspace.lse_log2(params.memory) : params.workspace.delta(params.memory);
      float* to = is_lse ? shared.lse_log2[stage] : shared.delta[stage];
      using Copy = cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>;
      Copy::copy(reinterpret_cast<cute::uint128_t const&>(from[tile_of(step) * kM + piece]),
                 reinterpret_cast<cute::uint128_t&>(to[piece]));
    }
  }

  /// Raw scores (row, column) to weights. Where scores are capped, `slope` gets the derivative of the cap.
  template <class Scores, class Coord, class Slopes>
  CUTE_DEVICE void weigh(Scores& scores, Coord const& coord, Slopes& slope, Step step, bool edge, bool folded,
                         const float* lse_log2) const {
    using namespace cute;
    const int key = work.n_block * kN;
    const ScoreTile<BackwardParams> score_tile{
        params, {work.batch, step.head, work.n_block}, key, work.sequence.lengths().transposed()};
    if (!folded) {
      score_tile.cap(scores);
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) slope(i) = 1.0f - scores(i) * scores(i);
      score_tile.stretch(scores, coord, step.m_block * kM);
    }
    if (edge) {
      score_tile.template mask<8 * kSharers>(scores, coord, step.m_block * kM);
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        if (key + get<0>(coord(r, 0)) < work.sequence.k.used) continue;
        CUTE_UNROLL
        for (int c = 0; c < size<1>(scores); ++c) scores(r, c) = -kInfinity;
      }
    }
    const float scale_log2 = folded ? params.score_map.outer_log2 : 1.0f;
    for_column_pairs(coord, lse_log2, [&](int c, float2 lse) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), scale_log2, -lse.x));
        scores(r, c + 1) = exp2_approx(fmaf(scores(r, c + 1), scale_log2, -lse.y));
      }
    });
  }

  /// Accumulates dK, before the scale, and dV of the block, (mma, key, head_dim) both, and adds its part of dQ to
  /// memory.
  template <class Accumulator>
  CUTE_DEVICE void run(Accumulator& tKrdK, Accumulator& tVrdV) const {
    using namespace cute;
    TileRanges const& blocks = work.queries;
    if (blocks.visible.empty()) return;
    const int key = work.n_block * kN;
    const bool partial = key + kN > work.sequence.k.used;
    const bool folded = folds(params);
    const int last_head = (work.kv_head + 1) * params.group - 1;
    // Each warp adds to a part of its own of a tile of dQ.
    // From the last query on even where no dQ is wanted: so dK and dV are the same.
    const bool backwards = kV.every_option && params.deterministic;
    const bool in_order = backwards && params.dq;
    const auto next = [&](Step step) {
      step.m_block += backwards ? -1 : 1;
      if (step.m_block == blocks.visible.end) step = {step.head + 1, blocks.visible.begin};
      if (step.m_block < blocks.visible.begin) step = {step.head + 1, blocks.visible.end - 1};
      return step;
    };
    const auto previous = [&](Step step) {
      if (++step.m_block == blocks.visible.end) step = {step.head - 1, blocks.visible.begin};
      return step;
    };
    const bool drops = kV.every_option && params.dropout.active();
    const auto sum_of = [&](Step step) { return SumOfDq(params, tile_of(step), thread / 32); };
    const auto pass = [&](Step step) {
      cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_device);
      __syncwarp();
      if (thread % 32 == 0) sum_of(step).pass(work.n_block);
    };

    Tensor cS = make_identity_tensor(Shape<Int<kN>, Int<kM>>{});              // (N, M)
    Tensor tScS = rows_and_columns(Mma{}.get_slice(thread).partition_C(cS));  // (row, column)
    Tensor sK = tile<SmemLayout<kN, kHeadDim>>(shared.k);                     // (N, head_dim)
    Tensor sKt = tile<SmemLayoutT<kN, kHeadDim>>(shared.k);                   // (head_dim, N)
    Tensor sV = tile<SmemLayout<kN, kHeadDim>>(shared.v);                     // (N, head_dim)
    Tensor sdSt = tile<SmemLayout<kN, kM>>(shared.scores[0]);                 // (N, M)
    Tensor sdS = tile<SmemLayoutT<kN, kM>>(shared.scores[0]);                 // (M, N)

    const Step first{work.kv_head * params.group, backwards ? blocks.visible.end - 1 : blocks.visible.begin};
    Step step = first;
    int stage = 0;
    load_keys();
    load_queries(step, stage);
    cp_async_fence();
    CUTE_NO_UNROLL
    while (true) {
      const Step ahead = next(step);
      const bool more = ahead.head <= last_head;
      cp_async_wait<0>();
      __syncthreads();  // this step's tiles are visible to every warp, and no warp still reads those of the last
      if (kStages == 2 && more) load_queries(ahead, stage ^ 1);
      cp_async_fence();

      Tensor sQ = tile<SmemLayout<kM, kHeadDim>>(shared.q[stage]);        // (M, head_dim)
      Tensor sQt = tile<SmemLayoutT<kM, kHeadDim>>(shared.q[stage]);      // (head_dim, M)
      Tensor sdO = tile<SmemLayout<kM, kHeadDim>>(shared.dout[stage]);    // (M, head_dim)
      Tensor sdOt = tile<SmemLayoutT<kM, kHeadDim>>(shared.dout[stage]);  // (head_dim, M)

      Tensor tSrS = partition_fragment_C(Mma{}, shape(cS));   // (mma, n, m): S, then P, then dS
      Tensor tSrdP = partition_fragment_C(Mma{}, shape(cS));  // (mma, n, m): what the cap's slope is, then dP
      Tensor scores = rows_and_columns(tSrS);                 // (row, column)
      Tensor other = rows_and_columns(tSrdP);                 // (row, column)
      clear(tSrS);
      multiply_shared<Mma, RowMajor, RowMajor>(sK, sQ, tSrS);
      const bool edge = partial || !blocks.interior.contains(step.m_block);
      weigh(scores, tScS, other, step, edge, folded, shared.lse_log2[stage]);
      if (drops)
        KeptOf<decltype(tScS)>::template of<Rows::kKeys, 8 * kSharers>(params.dropout, work.batch, step.head, tScS, key,
                                                                       step.m_block * kM)
            .mark(scores);
      if constexpr (kShareP)
        store_scores<Negative::kZero>(tSrS, shared.scores[1]);
      else
        multiply_scores<Negative::kZero>(tSrS, sdOt, tVrdV);
      if (params.score_map.capped()) {
        CUTE_UNROLL
        for (int i = 0; i < size(scores); ++i) scores(i) *= other(i);
      }

      // By now what the step before added is in memory, or soon will be; and who knows that it is its turn need not ask
      // again.
      bool turn = false;
      if (in_order) {
        if (step.head != first.head || step.m_block != first.m_block) pass(previous(step));
        turn = sum_of(step).ready(work.n_block);
      }
      clear(tSrdP);
      multiply_shared<Mma, RowMajor, RowMajor>(sV, sdO, tSrdP);
      if (drops) {
        CUTE_UNROLL
        for (int i = 0; i < size(scores); ++i) {
          other(i) = signbit(scores(i)) ? 0.0f : params.dropout.scale * other(i);
          scores(i) = fabsf(scores(i));
        }
      }
      for_column_pairs(tScS, shared.delta[stage], [&](int c, float2 delta) {
        CUTE_UNROLL
        for (int r = 0; r < size<0>(scores); ++r) {
          scores(r, c) *= other(r, c) - delta.x;
          scores(r, c + 1) *= other(r, c + 1) - delta.y;
        }
      });
      store_scores<Negative::kKeep>(tSrS, shared.scores[0]);
      if constexpr (!kShareP) multiply_scores<Negative::kKeep>(tSrS, sQt, tKrdK);
      __syncthreads();  // P and dS of all warps are there
      const auto add_dq = [&] {
        if (params.dq == nullptr) return;
        Tensor tQrdQ = partition_fragment_C(MmaQ{}, Shape<Int<kM>, Int<kHeadDim>>{});  // (mma, m, head_dim)
        clear(tQrdQ);
        multiply_shared<MmaQ, ColumnMajor, ColumnMajor>(sdS, sKt, tQrdQ);
        float* dq = dq_of_thread(params, tile_of(step), thread);
        if (in_order && !turn) sum_of(step).await(work.n_block);
        CUTE_UNROLL
        for (int i = 0; i < size(tQrdQ); ++i)
          asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(dq + i * kThreads), "f"(tQrdQ(i)) : "memory");
      };
      if constexpr (kShareP) {
        multiply_shared<Mma, RowMajor, ColumnMajor>(tile<SmemLayout<kN, kM>>(shared.scores[1]), sdOt, tVrdV);
        if (kAddUnderdK) add_dq();
        multiply_shared<Mma, RowMajor, ColumnMajor>(sdSt, sQt, tKrdK);
      }
      if (kStages == 1) {
        if (kShareP) __syncthreads();  // no warp still reads the tiles of this step
        if (more) load_queries(ahead, stage);
        cp_async_fence();
      }
      if (!kAddUnderdK) add_dq();
      if (!more) break;
      step = ahead;
      if (kStages == 2) stage ^= 1;
    }
    if (in_order) pass(step);
  }

  /// Where a thread's accumulators of MmaQ stand in the workspace, kThreads apart.
  CUTE_DEVICE static float* dq_of_thread(BackwardParams const& params, std::int64_t tile, int thread) {
    return params.workspace.dq(params.memory) + tile * (kM * kHeadDim) + thread;
  }
};

}  // namespace flashtile
