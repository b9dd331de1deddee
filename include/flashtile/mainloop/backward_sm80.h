// This mainloop takes one block of keys against all queries that see it, on mma.sync tensor cores: it forms dK and dV
// of the block, and its contribution to dQ (FlashAttention-2, Dao 2023).
//
// The warps have two roles. Half of them form S = Q·Kᵀ, the weights P, and dV = Pᵀ·dO; the other half form dP = dO·Vᵀ,
// the gradients of the scores dS = P∘(dP − delta), and dK = dSᵀ·Q: the same two products of other tiles. P goes from
// the first role to the second, and dS from the second to all warps, each of which then forms a part of dQ = dS·K. So
// half as many warps share a tile of scores and read fewer operands from shared memory. With two stages no barrier
// keeps all warps in step, so that one role multiplies while the other exponentiates.
//
// Everything is transposed: tiles of scores are (keys, queries), so that dK and dV stay in registers. Where a warp has
// all queries of its keys, its weights or their gradients are in registers as the second product takes them. Where head
// dimensions are too wide for the accumulators, two warps share their keys: they divide the queries of the scores and
// the columns of dK and dV, and read each other's scores from shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/launch.h"
#include "flashtile/load/cp_async.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/key_block.h"
#include "flashtile/mainloop/operands.h"
#include "flashtile/mainloop/query_steps.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mainloop/sum_of_dq.h"
#include "flashtile/math/element.h"
#include "flashtile/params.h"
#include "flashtile/variant.h"

namespace flashtile {

template <Variant kV>
struct BackwardMainloopSm80 {
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kStages = kV.stages;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr bool kKnowsOrderedDq = kV.knows(Features::kOrderedDq);
  static constexpr int kThreads = kV.threads();
  static_assert(kV.head_dim_v == kHeadDim && kHeadDim % 32 == 0 && (kStages == 1 || kStages == 2));

  /// Returns how many of the warps divide the `rows` of a product with `columns`. A warp has 32 rows, for which it
  /// reads fewer operands than for 16, unless that leaves the others less than 16 columns; or more, if warps are too
  /// few.
  static constexpr int warps_along(int rows, int columns, int warps) {
    for (const int of_warp : {32, 16}) {
      const int along = rows / of_warp;
      if (along >= 1 && along <= warps && columns % (16 * (warps / along)) == 0) return along;
    }
    return warps;
  }
  static_assert(kV.warps % 2 == 0);
  static constexpr int kRoleWarps = kV.warps / 2;
  static constexpr int kRoleThreads = kThreads / 2;
  static constexpr int kWarpsOfKeys = warps_along(kN, kM, kRoleWarps);
  static constexpr int kSharers = kRoleWarps / kWarpsOfKeys;  // warps that share their keys
  static constexpr bool kShare = kSharers > 1;
  static constexpr int kWarpsOfQueries = warps_along(kM, kHeadDim, kV.warps);  // for dQ
  static_assert(kN % (16 * kWarpsOfKeys) == 0 && kM % (16 * kSharers) == 0 && kM % (16 * kWarpsOfQueries) == 0 &&
                kHeadDim % (16 * kSharers) == 0 && kHeadDim % (16 * (kV.warps / kWarpsOfQueries)) == 0);

  using Element = ElementOf<kV.dtype>;
  using MmaAtom = MmaAtomSm80<kV.dtype>;
  template <int kWarpsM, int kWarpsN>
  using MmaOf = cute::TiledMMA<cute::MMA_Atom<MmaAtom>,
                               cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>>,
                               cute::Tile<cute::Int<16 * kWarpsM>, cute::Int<16 * kWarpsN>, cute::_16>>;
  using Mma = MmaOf<kWarpsOfKeys, kSharers>;                        // S, dP, dV, dK: rows are keys
  using MmaQ = MmaOf<kWarpsOfQueries, kV.warps / kWarpsOfQueries>;  // dQ

  // Shared memory is swizzled as in the forward.
  template <int kRows, int kColumns>
  using SmemLayout = decltype(cute::tile_to_shape(
      cute::composition(cute::Swizzle<kColumns % 64 == 0 ? 3 : 2, 3, 3>{},
                        cute::Layout<cute::Shape<cute::_8, cute::Int<kColumns % 64 == 0 ? 64 : 32>>,
                                     cute::Stride<cute::Int<kColumns % 64 == 0 ? 64 : 32>, cute::_1>>{}),
      cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));
  /// This is the same memory with rows and columns exchanged.
  template <int kRows, int kColumns>
  using SmemLayoutT = decltype(cute::composition(
      SmemLayout<kRows, kColumns>{},
      cute::Layout<cute::Shape<cute::Int<kColumns>, cute::Int<kRows>>, cute::Stride<cute::Int<kRows>, cute::_1>>{}));
  template <int kOfThreads>
  using LoadOf = CpAsyncTile<Element, kHeadDim % 64 == 0 ? 64 : 32, kOfThreads>;
  using Load = LoadOf<kRoleThreads>;
  using StoreQ = LoadOf<kThreads>;
  static_assert(kM % StoreQ::kRowsPerPass == 0 && kN % Load::kRowsPerPass == 0);

  struct SharedStorage {
    alignas(128) Element k[kN * kHeadDim];
    alignas(128) Element v[kN * kHeadDim];
    alignas(128) Element q[kStages][kM * kHeadDim];
    alignas(128) Element dout[kStages][kM * kHeadDim];
    alignas(128) Element weights[kN * kM];  // P as dV takes it; under a cap first the cap's slope, for the same thread
    // This is dS. Before that it has the weights that dS needs, where dV takes others: under a cap, and with dropout.
    alignas(128) Element dscores[kN * kM];
    alignas(16) float lse_log2[kStages][kM];
    alignas(16) float delta[kStages][kM];
  };

  using Work = KeyBlock<kM, kN, true, kKnowsOrderedDq, false,
                        kV.may_mask_backward() ? ColumnMasks::kAsAsked : ColumnMasks::kNever>;
  using Step = QueryStep;

  enum Role { kWeights, kGradients };

  BackwardParams const& params;
  SharedStorage& shared;
  Work const& work;
  Role role;
  int thread;  // among those of the role

  CUTE_DEVICE BackwardMainloopSm80(BackwardParams const& params, SharedStorage& shared, Work const& work)
      : params(params),
        shared(shared),
        work(work),
        // The shuffle tells the compiler that the role is the same for all threads of a warp.
        role(__shfl_sync(~0u, threadIdx.x / kRoleThreads, 0) == 0 ? kWeights : kGradients),
        thread(threadIdx.x % kRoleThreads) {}
  CUTE_DEVICE bool weighs() const { return role == kWeights; }

  template <class Layout, class Memory>
  CUTE_DEVICE static auto tile(Memory* memory) {
    return cute::make_tensor(cute::make_smem_ptr(memory), Layout{});
  }

  using RowMajor = cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>;     // for operands whose k runs along memory
  using ColumnMajor = cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>;  // for those whose k does not

  /// Adds A · Bᵀ to `acc`, for B (N, K) in shared memory. `load_a(k)` makes a slice of A ready, which `a(k)` then is. A
  /// slice of operands is being loaded while the one before is multiplied.
  template <class TiledMma, class AtomB, class LoadA, class A, class SharedB, class Accumulator>
  CUTE_DEVICE void multiply(LoadA&& load_a, A&& a, SharedB const& sB, Accumulator& acc) const {
    using namespace cute;
    TiledMma mma;
    const int thread = int(threadIdx.x) % int(size(mma));
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

  /// Adds A · Bᵀ to `acc`, for A (M, K) and B (N, K) in shared memory.
  template <class TiledMma, class AtomA, class AtomB, class SharedA, class SharedB, class Accumulator>
  CUTE_DEVICE void multiply_shared(SharedA const& sA, SharedB const& sB, Accumulator& acc) const {
    using namespace cute;
    TiledMma mma;
    const int thread = int(threadIdx.x) % int(size(mma));
    const auto copy_a = make_tiled_copy_A(AtomA{}, mma);
    const auto copy_a_thread = copy_a.get_slice(thread);
    Tensor tCsA = copy_a_thread.partition_S(sA);  // (copy, m, k)
    Tensor tCrA =
        mma.get_slice(thread).partition_fragment_A(make_tensor(sA.data(), product_each(shape(sA))));  // (mma, m, k)
    Tensor tCrA_copy = copy_a_thread.retile_D(tCrA);                                                  // (copy, m, k)
    multiply<TiledMma, AtomB>([&](int k) { copy(copy_a, tCsA(_, _, k), tCrA_copy(_, _, k)); },
                              [&](int k) { return tCrA(_, _, k); }, sB, acc);
  }

  /// Adds A · Bᵀ to `acc`, where A is accumulators, which it rounds.
  template <class Scores, class SharedB, class Accumulator>
  CUTE_DEVICE void multiply_scores(Scores& scores, SharedB const& sB, Accumulator& acc) const {
    multiply<Mma, ColumnMajor>([](int) {},
                               [&](int k) {
                                 auto block = n16_block(scores, k);
                                 return as_operand_a<Element>(block);
                               },
                               sB, acc);
  }

  using ScoreCopy = cute::AutoVectorizingCopyWithAssumedAlignment<32>;
  CUTE_DEVICE auto score_copy() const {
    return cute::make_tiled_copy_C(cute::Copy_Atom<ScoreCopy, Element>{}, Mma{}).get_slice(thread);
  }

  template <Negative kNegative, class Scores>
  CUTE_DEVICE void store_scores(Scores const& scores, Element* to) const {
    using namespace cute;
    Tensor rounded = make_fragment_like<Element>(scores);
    round_to<kNegative>(scores, rounded);
    const auto copy_c = score_copy();
    copy(ScoreCopy{}, copy_c.retile_S(rounded), copy_c.partition_D(tile<SmemLayout<kN, kM>>(to)));
  }

  /// Returns what the thread, or the same one of the other role, has stored, in the order of accumulators.
  template <class Scores>
  CUTE_DEVICE auto stored_scores(Scores const& like, Element* from) const {
    using namespace cute;
    Tensor handed = make_fragment_like<Element>(like);
    const auto copy_c = score_copy();
    copy(ScoreCopy{}, copy_c.partition_D(tile<SmemLayout<kN, kM>>(from)), copy_c.retile_S(handed));
    return handed;
  }

  // These named barriers are for the threads of one role among themselves, sync_role(), and for what one role tells the
  // other, which waits for it: the first role for dO and for dS, the second for the weights. CUTLASS has such for
  // Hopper alone. Nobody tells something twice before the other has heard it, as each role waits for the other in each
  // step.
  enum Told { kWeightsAreThere, kScoreGradientsAreThere, kOutputGradientIsThere };
  CUTE_DEVICE void sync_role() const { asm volatile("bar.sync %0, %1;" ::"r"(1 + role), "n"(kRoleThreads) : "memory"); }
  CUTE_DEVICE static void tell(Told what) {
    asm volatile("bar.arrive %0, %1;" ::"r"(3 + what), "n"(kThreads) : "memory");
  }
  CUTE_DEVICE static void await(Told what) {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + what), "n"(kThreads) : "memory");
  }

  /// Returns the index of a tile in the workspace, as work.workspace_tile does, but without a register to keep.
  CUTE_DEVICE std::int64_t tile_of(Step step) const {
    const bool ragged = params.ragged_keys.given();
    return step.m_block + (ragged ? params.workspace_tile(work.batch, step.head, work.sequence.q)
                                  : params.workspace_tile(work.batch, step.head));
  }

  /// Loads a role's tile of keys: K, or V.
  CUTE_DEVICE void load_keys() const {
    const Span span = work.sequence.k;
    const int first = work.n_block * kN;
    Load::load(
        head_tile<kN, kHeadDim, Element>(weighs() ? params.k : params.v, weighs() ? params.k_strides : params.v_strides,
                                         work.batch, work.kv_head, span.first + first),
        tile<SmemLayout<kN, kHeadDim>>(weighs() ? shared.k : shared.v), span.used - first,
        weighs() ? params.head_dim : params.head_dim_v, thread);
  }

  /// Loads a role's tile of queries: Q and lse, or dO and delta.
  CUTE_DEVICE void load_queries(Step step, int stage) const {
    const Span span = work.sequence.q;
    const int first = step.m_block * kM;
    // The numbers of rows come first. One warp of the role copies them: where it worked out their addresses behind the
    // loads of the tile, all others waited for it in every step, which cost up to 4 % of the kernel.
    constexpr int kPieces = kM / 4;  // vectors of 16 bytes
    static_assert(kPieces <= kRoleThreads);
    if (thread < kPieces) {
      const float* from = weighs() ? params.workspace.lse_log2(params.memory) : params.workspace.delta(params.memory);
      float* to = weighs() ? shared.lse_log2[stage] : shared.delta[stage];
      using Copy = cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>;
      Copy::copy(reinterpret_cast<cute::uint128_t const&>(from[tile_of(step) * kM + 4 * thread]),
                 reinterpret_cast<cute::uint128_t&>(to[4 * thread]));
    }
    Load::load(head_tile<kM, kHeadDim, Element>(weighs() ? params.q : params.dout,
                                                weighs() ? params.q_strides : params.dout_strides, work.batch,
                                                step.head, span.first + first),
               tile<SmemLayout<kM, kHeadDim>>(weighs() ? shared.q[stage] : shared.dout[stage]), span.used - first,
               weighs() ? params.head_dim : params.head_dim_v, thread);
  }

  /// Turns raw scores `acc` into weights. Under a cap it leaves the cap's derivative in shared.weights for run().
  template <class Scores, class Coord>
  CUTE_DEVICE void weigh(Scores& acc, Coord const& coord, Step step, bool edge, bool partial, bool steep,
                         const float* lse_log2) const {
    using namespace cute;
    Tensor scores = rows_and_columns(acc);  // (row, column)
    const int key = work.n_block * kN;
    const ScoreTile<NoPacking> score_tile{
        params.scores, {work.batch, step.head, work.n_block}, key, work.sequence.lengths().transposed()};
    if (params.scores.map.maps()) {
      if (params.scores.map.capped) {
        score_tile.template cap<Softcaps::kAny>(scores);
        Tensor slopes = make_fragment_like(acc);
        CUTE_UNROLL
        for (int i = 0; i < size(acc); ++i) slopes(i) = 1.0f - acc(i) * acc(i);
        store_scores<Negative::kKeep>(slopes, shared.weights);
      }
      if (params.scores.map.stretched) score_tile.stretch(scores, coord, step.m_block * kM);
    }
    if (edge) {
      score_tile.template mask<8 * kSharers>(scores, coord, step.m_block * kM);
      if (work.masked()) {
        HiddenQueries<size<0>(decltype(scores.layout()){}), 8 * kSharers> hidden;
        hidden.find(coord, params.columns.of_head(work.batch, step.head, work.sequence.k) + key,
                    work.sequence.k.used - key, step.m_block * kM);
        hidden.hide(scores);
      }
    }
    if (partial) hide_keys_behind(work.sequence.k.used - key, scores, coord);
    if (steep) [[unlikely]]
      relate_steep_rows<8 * kSharers>(params, scores, coord, lse_log2, tile_of(step) * kM);
    const float unit_log2 = params.scores.map.unit_log2;
    for_column_pairs(coord, lse_log2, [&](int c, float2 lse) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), unit_log2, -lse.x));
        scores(r, c + 1) = exp2_approx(fmaf(scores(r, c + 1), unit_log2, -lse.y));
      }
    });
  }

  CUTE_DEVICE bool capped() const { return params.scores.map.capped; }
  CUTE_DEVICE bool drops() const { return kKnowsDropout && params.dropout.active(); }

  // Where sums are in order (deterministic), each warp adds to a part of its own (see SumOfDq). The order of steps
  // holds even where no dQ is wanted, so that dK and dV are the same.
  CUTE_DEVICE bool in_order() const { return kKnowsOrderedDq && params.deterministic && params.dq; }

  CUTE_DEVICE SumOfDq sum_of(Step const& step) const { return SumOfDq(params, tile_of(step), int(threadIdx.x) / 32); }
  CUTE_DEVICE int turn(Step const& step) const { return work.turn(params, step.m_block); }
  /// Lets the next block of keys add to dQ of a step.
  CUTE_DEVICE void pass(Step const& step) const {
    cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_device);
    __syncwarp();
    if (thread % 32 == 0) sum_of(step).pass(turn(step));
  }

  /// Turns the scores `acc` into weights, and gives them to the other role.
  template <class Scores, class Coord>
  CUTE_DEVICE void form_weights(Scores& acc, Coord const& tScS, Step step, bool edge, bool partial, bool steep,
                                const float* lse_log2) const {
    using namespace cute;
    weigh(acc, tScS, step, edge, partial, steep, lse_log2);
    Tensor scores = rows_and_columns(acc);  // (row, column)
    if constexpr (kKnowsDropout) {
      if (drops())
        DropoutTile<Rows::kKeys, 8 * kSharers>(params.dropout, work.batch, step.head, work.n_block * kN,
                                               step.m_block * kM)
            .for_each(tScS, [&](int r, int c, auto kept) { kept.mark(scores, r, c); });
    }
    await(kOutputGradientIsThere);  // dO is there, and the other role no longer reads the last step's dS and Q
    if (capped()) {
      Tensor handed = make_fragment_like(acc);
      Tensor slope = stored_scores(acc, shared.weights);
      CUTE_UNROLL
      for (int i = 0; i < size(acc); ++i) handed(i) = acc(i) * float(slope(i));
      store_scores<Negative::kKeep>(handed, shared.dscores);
    } else if (drops()) {
      store_scores<Negative::kKeep>(acc, shared.dscores);
    }
    store_scores<Negative::kZero>(acc, shared.weights);
    tell(kWeightsAreThere);
    if (drops() && !kShare) {  // in registers, dropped weights are still negative
      CUTE_UNROLL
      for (int i = 0; i < size(acc); ++i) {
        if (acc(i) < 0) acc(i) = 0;
      }
    }
  }

  /// Turns dP in `acc` into dS, with the other role's weights, and gives it to all warps.
  template <class Scores, class Coord>
  CUTE_DEVICE void form_score_gradients(Scores& acc, Coord const& tScS, const float* delta_of_queries) const {
    using namespace cute;
    await(kWeightsAreThere);  // weights, Q and K are there, and nobody still reads the last step's dO and dS
    Tensor scores = rows_and_columns(acc);  // (row, column)
    Tensor handed = stored_scores(acc, capped() || drops() ? shared.dscores : shared.weights);
    Tensor weights = rows_and_columns(handed);  // (row, column)
    for_column_pairs(tScS, delta_of_queries, [&](int c, float2 delta) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float weight = float(weights(r, c + i));
          float d = scores(r, c + i);
          if (drops()) d = signbit(weight) ? 0.0f : params.dropout.scale * d;
          scores(r, c + i) = (drops() ? fabsf(weight) : weight) * (d - (i ? delta.y : delta.x));
        }
      }
    });
    store_scores<Negative::kKeep>(acc, shared.dscores);
    tell(kScoreGradientsAreThere);
  }

  /// Adds this block's dS·K to dQ of a step; `has_turn` says whether it knows already that its turn has come.
  CUTE_DEVICE void add_to_dq(Step const& step, bool has_turn) const {
    using namespace cute;
    Tensor tQrdQ = partition_fragment_C(MmaQ{}, Shape<Int<kM>, Int<kHeadDim>>{});  // (mma, m, head_dim)
    clear(tQrdQ);
    multiply_shared<MmaQ, ColumnMajor, ColumnMajor>(tile<SmemLayoutT<kN, kM>>(shared.dscores),
                                                    tile<SmemLayoutT<kN, kHeadDim>>(shared.k), tQrdQ);
    float* dq = dq_of_thread(params, tile_of(step), threadIdx.x);
    if (in_order() && !has_turn) sum_of(step).await(turn(step));
    CUTE_UNROLL
    for (int i = 0; i < size(tQrdQ); ++i)
      asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(dq + i * kThreads), "f"(tQrdQ(i)) : "memory");
  }

  /// Accumulates a gradient of the block (mma, key, head_dim), by role dV or, before the scale, dK, and adds the
  /// block's part of dQ to memory.
  template <class Accumulator>
  CUTE_DEVICE void run(Accumulator& gradient) const {
    using namespace cute;
    if (work.empty()) return await_kernel_before();
    load_keys();
    await_kernel_before();  // which zeros dQ, and writes what follows of each row
    const bool partial = (work.n_block + 1) * kN > work.sequence.k.used;
    const bool steep = params.steep();

    Tensor cS = make_identity_tensor(Shape<Int<kN>, Int<kM>>{});                            // (N, M)
    Tensor tScS = rows_and_columns(Mma{}.get_slice(thread).partition_C(cS));                // (row, column)
    Tensor sKeys = tile<SmemLayout<kN, kHeadDim>>(weighs() ? shared.k : shared.v);          // (N, head_dim)
    Tensor sScores = tile<SmemLayout<kN, kM>>(weighs() ? shared.weights : shared.dscores);  // (N, M)

    QuerySteps<Work> steps(params, work);
    Step step = steps.first(), before = step;
    int left = work.steps;
    int stage = 0;
    load_queries(step, stage);
    cp_async_fence();
    CUTE_NO_UNROLL
    while (true) {
      const bool more = left > 1;
      const Step ahead = more ? steps.after(step) : step;
      Element* q = shared.q[stage];
      Element* dout = shared.dout[stage];
      Tensor sQueries = tile<SmemLayout<kM, kHeadDim>>(weighs() ? q : dout);    // (M, head_dim)
      Tensor sQueriesT = tile<SmemLayoutT<kM, kHeadDim>>(weighs() ? dout : q);  // (head_dim, M)

      cp_async_wait<0>();
      sync_role();  // this step's tile is visible to the role, and no thread of it still reads the last one's
      if (!weighs()) tell(kOutputGradientIsThere);
      Tensor acc = partition_fragment_C(Mma{}, shape(cS));  // (mma, n, m): S, then P; or dP, then dS
      clear(acc);
      multiply_shared<Mma, RowMajor, RowMajor>(sKeys, sQueries, acc);
      // By now what the step before added is in memory, or soon will be, and the next block of keys may add. If the
      // warp learns here that its own turn has come, it need not ask again.
      bool has_turn = false;
      if (in_order()) {
        if (left < work.steps) pass(before);
        has_turn = sum_of(step).ready(turn(step));
      }
      if (weighs())
        form_weights(acc, tScS, step, step.edge, partial, steep, shared.lse_log2[stage]);
      else
        form_score_gradients(acc, tScS, shared.delta[stage]);
      if (kStages == 2) {
        if (more) load_queries(ahead, stage ^ 1);
        cp_async_fence();
      }
      if constexpr (kShare) {
        sync_role();  // the role's scores are there, which its warps read
        multiply_shared<Mma, RowMajor, ColumnMajor>(sScores, sQueriesT, gradient);
      } else {
        multiply_scores(acc, sQueriesT, gradient);
      }
      if (weighs())
        await(kScoreGradientsAreThere);  // dS is there, of which dQ is formed
      else if (!kShare)
        sync_role();  // the role's dS is there
      if (kStages == 1) {
        __syncthreads();  // no warp still reads the tiles of this step
        if (more) load_queries(ahead, stage);
        cp_async_fence();
      }
      if (params.dq) add_to_dq(step, has_turn);
      if (!more) break;
      before = step;
      step = ahead;
      --left;
      if (kStages == 2) stage ^= 1;
    }
    if (in_order()) pass(step);
  }

  /// Returns where a thread's accumulators of MmaQ begin in the workspace; they are kThreads floats apart.
  CUTE_DEVICE static float* dq_of_thread(BackwardParams const& params, std::int64_t tile, int thread) {
    return params.workspace.dq(params.memory) + tile * (kM * kHeadDim) + thread;
  }
};

}  // namespace flashtile
