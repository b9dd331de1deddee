// Blocks of keys, each against all queries that see it, on Hopper's warpgroup matmuls: dK and dV of the block, and its
// part of dQ (FlashAttention-3, Shah et al. 2024).
//
// Tiles of scores are transposed, (keys, queries), and each of two consumer warpgroups owns 64 whole keys: weights and
// their gradients stay in registers as the A operand of dV and dK. For dQ, a sum over all keys of the block, dS goes
// through shared memory; each warpgroup forms half of the tile, which a writer thread has TMA add to memory. A producer
// thread has TMA bring K and V, and tiles of Q and dO through a ring. One more may hand out blocks of keys.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "flashtile/barrier.h"
#include "flashtile/load/tma.h"
#include "flashtile/mainloop/dropped.h"
#include "flashtile/mainloop/key_block.h"
#include "flashtile/mainloop/scores.h"
#include "flashtile/mainloop/sum_of_dq.h"
#include "flashtile/mainloop/wgmma.h"
#include "flashtile/math/round.h"
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
template <Variant kV, Takes kTakes>
struct BackwardOnePassSm90 {
  static constexpr bool kLoops = kTakes != Takes::kBlock;
  static constexpr bool kRagged = kTakes == Takes::kNext;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kStages = kV.stages;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr bool kKnowsSoftcap = kV.knows(Features::kSoftcap);
  static constexpr int kWarpgroups = 2;  // consumers
  // Of a thread: 504 among the three warpgroups. A producer that works out the next block of keys could do with 40.
  static constexpr int kRegisters = kM == 64 && kV.features == Features::kNone ? 232 : 240;
  static constexpr int kProducerRegisters = 504 - 2 * kRegisters;
  static_assert(kV.head_dim_v == kHeadDim && kHeadDim % 64 == 0 && kN == 64 * kWarpgroups && kM % 16 == 0 &&
                kV.warps == 4 * (kWarpgroups + 1));

  using Element = std::conditional_t<kV.dtype == DType::kFloat16, cute::half_t, cute::bfloat16_t>;
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

  /// Hands out blocks. Where sums are in order, who waits for a block must know that somebody has it: so all are taken
  /// in turn, where otherwise each thread block has its first one beforehand.
  struct Scheduler {
    BackwardOnePassParams const& params;
    SharedStorage& shared;

    CUTE_DEVICE void run() {
      const bool in_order = params.backward.deterministic;
      const auto take = [&] { return (in_order ? 0 : int(gridDim.x)) + atomicAdd(params.backward.taken, 1); };
      Ring<1>::Cursor at{};
      int index = blockIdx.x;
      bool taken = !in_order;
      for (bool more = true; more; at.advance()) {
        shared.work_barriers.fill(at, [&] {
          if (!taken) index = take();
          more = shared.more = index < params.blocks && shared.work.find(params.backward, index);
          return 0;
        });
        // Nobody else can have what is taken; but a block that is soon done should not wait for the answer.
        taken = more && shared.work.steps() <= kStepsAhead;
        if (taken) index = take();
      }
    }
  };

  /// The blocks of keys that a thread block takes.
  struct Blocks {
    BackwardOnePassParams const& params;
    SharedStorage& shared;
    Work only;  // if it does not loop; found by all threads before registers are shared out, as a producer has few

    CUTE_DEVICE Blocks(BackwardOnePassParams const& params, SharedStorage& shared) : params(params), shared(shared) {
      if constexpr (!kLoops) only = Work(params.backward, blockIdx.x);
    }

    /// Calls `visit(work, release)` for each, which calls `release()` when the next block may be handed out to this
    /// thread block.
    template <class Visit>
    CUTE_DEVICE void for_each(Visit&& visit_and_release) const {
      const auto visit = [&](Work const& work) __attribute__((always_inline)) { visit_and_release(work, [] {}); };
      if constexpr (kTakes == Takes::kBlock) {
        visit(only);
      } else if constexpr (kTakes == Takes::kBlocks) {
        // Rounds alternate in direction: under a mask, who got the longest block of one gets the shortest of the next.
        int place = blockIdx.x;
        CUTE_NO_UNROLL
        for (int first = 0; first < params.blocks; first += gridDim.x) {
          if (first + place < params.blocks) visit(Work(params.backward, first + place));
          place = gridDim.x - 1 - place;
        }
      } else {
        CUTE_NO_UNROLL
        for (Ring<1>::Cursor at{};; at.advance()) {
          shared.work_barriers.wait_full(at);
          if (!shared.more) return;
          const Work work = shared.work;
          visit_and_release(work, [&] { shared.work_barriers.release_by_thread(at); });
        }
      }
    }
  };

  struct Producer {
    BackwardOnePassParams const& params;
    SharedStorage& shared;
    typename Ring<kStages>::Cursor at{};
    typename Ring<1>::Cursor keys_at{};

    CUTE_DEVICE void run(Blocks const& blocks) {
      blocks.for_each([&](Work const& work, auto release) { load(work, release); });
    }

    template <class Release>
    CUTE_DEVICE void load(Work const& work, Release&& release) {
      if (work.queries.visible.empty()) return release();
      int left = work.steps();
      // Early enough for the next block's tiles to be on their way.
      const int release_at = min(left, kStepsAhead);
      const auto load_keys = [&](CUtensorMap const& map, Ring<1>& ring, Element* to) {
        std::uint64_t* barrier = ring.fill(keys_at, [] { return sizeof(SharedStorage::k); });
        load_tile<kN, kHeadDim, kColumns>(map, barrier, to, work.k_rows(params.backward), work.n_block * kN,
                                          work.kv_head);
      };
      work.for_each([&](int head, int m_block) {
        const bool first = head == work.kv_head * work.group && m_block == work.start;
        const auto load_queries = [&](CUtensorMap const& map, std::uint64_t* barrier, Element* to) {
          load_tile<kM, kHeadDim, kColumns>(map, barrier, to, work.q_rows(params.backward), m_block * kM, head);
        };
        std::uint64_t* barrier = shared.q_barriers.fill(
            at, [] { return sizeof(SharedStorage::q[0]) + sizeof(SharedStorage::statistics[0]); });
        load_queries(params.q, barrier, shared.q[at.stage]);
        cute::SM90_TMA_LOAD_2D::copy(
            &params.statistics, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
            shared.statistics[at.stage], work.workspace_tile(params.backward, head, m_block) * kM, 0);
        if (first) load_keys(params.k, shared.k_barriers, shared.k);  // when the block before is done with its own
        barrier = shared.dout_barriers.fill(at, [] { return sizeof(SharedStorage::dout[0]); });
        load_queries(params.dout, barrier, shared.dout[at.stage]);
        if (first) load_keys(params.v, shared.v_barriers, shared.v);
        at.advance();
        if (left-- == release_at) release();
      });
      if (kLoops) keys_at.advance();
    }
  };

  /// One thread for each consumer warpgroup has TMA add its part of dQ to memory.
  struct Writer {
    BackwardOnePassParams const& params;
    SharedStorage& shared;
    int warpgroup;
    unsigned parity = 0;

    CUTE_DEVICE void run(Blocks const& blocks) {
      const bool wanted = params.backward.dq != nullptr;
      if (!kRagged && !wanted) return;
      blocks.for_each([&](Work const& work, auto release) {
        release();  // who hands blocks out waits for this one too
        if (wanted) add(work);
      });
    }

    CUTE_DEVICE void add(Work const& work) {
      work.for_each([&](int head, int m_block) {
        const std::int64_t tile = work.workspace_tile(params.backward, head, m_block);
        const SumOfDq sum(params.backward, tile, warpgroup);
        const bool in_order = params.backward.deterministic;
        const bool there = !in_order && sum.there();  // asked early: almost always it is, and nobody waits for that
        shared.dq_full[warpgroup].wait(parity);
        const bool first = in_order ? sum.await(work.n_block) : !there && sum.claim();
        asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA sees what others had it write
        const int place = int((tile * kWarpgroups + warpgroup) * (kPartOfQ / kColumnsOfPart));
        if (first)
          cute::SM90_TMA_STORE_2D::copy(&params.dq, shared.dq[warpgroup], 0, place);
        else
          cute::SM90_TMA_REDUCE_ADD_2D::copy(&params.dq, shared.dq[warpgroup], 0, place);
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // it has been read
        shared.dq_empty[warpgroup].arrive();
        if (first || in_order) {
          asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // and is in memory
          in_order ? sum.pass(work.n_block) : sum.announce();
        }
        parity ^= 1;
      });
    }
  };

  /// A thread of the consumer warpgroups; `thread` counts from the first of them.
  struct Consumer {
    BackwardOnePassParams const& params;
    SharedStorage& shared;
    int thread;

    /// Where in shared memory a thread stores its first rows of dS.
    CUTE_DEVICE std::uint32_t place_of_scores() const {
      const int lane = thread % 32;
      const int key = thread / 32 * 16 + lane / 8 % 2 * 8;
      const int query = lane / 16 * 8 + lane % 8;
      return cute::cast_smem_ptr_to_uint(shared.ds[0] + PlacesOfdS{}(query, key, 0));
    }

    /// dS, (mma, key, query) in `rounded`, as rows of queries: blocks of 8 × 8 transposed on the way.
    template <class Rounded>
    CUTE_DEVICE void store_scores(Rounded const& rounded, std::uint32_t place, int buffer) const {
      using namespace cute;
      constexpr int kStep = PlacesOfdS{}(_16{}, _0{}, _0{}) * sizeof(Element);  // 16 queries on: swizzled alike
      auto words = recast<std::uint32_t>(rounded);  // two words of each 8 queries: keys r = 0, 1
      CUTE_UNROLL
      for (int i = 0; i < size(words); i += 4)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         place + buffer * int(sizeof(SharedStorage::ds[0])) + i / 4 * kStep),
                     "r"(words(i)), "r"(words(i + 1)), "r"(words(i + 2)), "r"(words(i + 3))
                     : "memory");
    }

    /// Calls `finish(work, tKrdK, tVrdV)` for each block, with dK, before the scale, and dV, (mma, key, head_dim) both.
    template <class Finish>
    CUTE_DEVICE void run(Blocks const& blocks, Finish&& finish) {
      using namespace cute;
      BackwardParams const& backward = params.backward;
      MmaS mma_s;
      MmaKV mma_kv;
      MmaQ mma_q;
      const int warpgroup = uniform(thread / 128);
      auto s_warpgroup = mma_s.get_slice(warpgroup * 128);
      auto q_warpgroup = mma_q.get_slice(warpgroup * 128);
      Tensor sK = make_tensor(make_smem_ptr(shared.k), SmemTile<Element, kN, kHeadDim, 1>{});    // (N, head_dim, 1)
      Tensor sKt = make_tensor(make_smem_ptr(shared.k), SmemTileT<Element, kN, kHeadDim, 1>{});  // (head_dim, N, 1)
      Tensor sV = make_tensor(make_smem_ptr(shared.v), SmemTile<Element, kN, kHeadDim, 1>{});    // (N, head_dim, 1)
      Tensor sQ =
          make_tensor(make_smem_ptr(shared.q[0]), SmemTile<Element, kM, kHeadDim, kStages>{});  // (M, head_dim, stage)
      Tensor sQt =
          make_tensor(make_smem_ptr(shared.q[0]), SmemTileT<Element, kM, kHeadDim, kStages>{});  // (head_dim, M, stage)
      Tensor sdO = make_tensor(make_smem_ptr(shared.dout[0]),
                               SmemTile<Element, kM, kHeadDim, kStages>{});  // (M, head_dim, stage)
      Tensor sdOt = make_tensor(make_smem_ptr(shared.dout[0]),
                                SmemTileT<Element, kM, kHeadDim, kStages>{});  // (head_dim, M, stage)
      Tensor sdS = make_tensor(make_smem_ptr(shared.ds[0]), SmemLayoutdS{});   // (M, N, buffer)

      Tensor tSrK = s_warpgroup.partition_fragment_A(sK)(_, _, _, 0);  // (mma, n, k)
      Tensor tSrV = s_warpgroup.partition_fragment_A(sV)(_, _, _, 0);  // (mma, n, k)
      Tensor tSrQ = s_warpgroup.partition_fragment_B(sQ);              // (mma, m, k, stage)
      Tensor tSrdO = s_warpgroup.partition_fragment_B(sdO);            // (mma, m, k, stage)
      auto kv_thread = mma_kv.get_slice(thread);
      Tensor tVrdO = kv_thread.partition_fragment_B(sdOt);  // (mma, head_dim, k, stage)
      Tensor tKrQ = kv_thread.partition_fragment_B(sQt);    // (mma, head_dim, k, stage)

      Tensor cS = make_identity_tensor(Shape<Int<kN>, Int<kM>>{});              // (N, M)
      Tensor tScS = rows_and_columns(mma_s.get_slice(thread).partition_C(cS));  // (row, column)
      Tensor tSrS = partition_fragment_C(mma_s, shape(cS));                     // (mma, n, m)
      Tensor tSrdP = partition_fragment_C(mma_s, shape(cS));                    // (mma, n, m)
      const auto rounded = [] { return make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kM / 16>>>{}); };
      Tensor tVrP = rounded();                 // (mma, n, k)
      Tensor tKrdS = rounded();                // (mma, n, k)
      Tensor scores = rows_and_columns(tSrS);  // (row, column)
      Tensor other = rows_and_columns(tSrdP);  // (row, column)

      const bool maps = backward.score_map.maps();
      const float unit_log2 = backward.score_map.unit_log2;
      const bool steep = backward.steep();
      typename Ring<kStages>::Cursor at{};
      Tensor tQrdQ = partition_fragment_C(mma_q, take<0, 2>(ShapeQ{}));  // (mma, m, head_dim), or turned
      const auto start_dq = [&](int buffer) __attribute__((always_inline)) {
        if constexpr (kTurned)
          start_matmul(mma_q, q_warpgroup.partition_fragment_A(sKt)(_, _, _, 0),
                       q_warpgroup.partition_fragment_B(sdS)(_, _, _, buffer), tQrdQ, SM90::GMMA::ScaleOut::Zero);
        else
          start_matmul(mma_q, q_warpgroup.partition_fragment_A(sdS)(_, _, _, buffer),
                       q_warpgroup.partition_fragment_B(sKt)(_, _, _, 0), tQrdQ, SM90::GMMA::ScaleOut::Zero);
      };
      typename Ring<2>::Cursor ds_at{};
      typename Ring<2>::Cursor dq_at{};
      typename Ring<1>::Cursor keys_at{};
      const std::uint32_t place_of_scores = this->place_of_scores();
      unsigned dq_parity = 0;
      const auto finish_dq = [&] {
        __syncwarp();
        if (thread % 32 == 0) shared.ds_empty[dq_at.stage].arrive();
        dq_at.advance();
        if (backward.dq == nullptr) return;
        shared.dq_empty[warpgroup].wait(dq_parity ^ 1);
        hand_over(tQrdQ, warpgroup);
        dq_parity ^= 1;
      };

      blocks.for_each([&](Work const& work, auto release) __attribute__((always_inline)) {
        release();
        Tensor tKrdK = partition_fragment_C(mma_kv, Shape<Int<kN>, Int<kHeadDim>>{});  // (mma, key, head_dim)
        Tensor tVrdV = partition_fragment_C(mma_kv, Shape<Int<kN>, Int<kHeadDim>>{});  // (mma, key, head_dim)
        if (work.queries.visible.empty()) {
          clear(tKrdK);
          clear(tVrdV);
          return finish(work, tKrdK, tVrdV);
        }
        const int key = work.n_block * kN;
        const Lengths lengths = work.lengths(backward);
        const bool partial = key + kN > lengths.k;
        bool started = false;
        auto opening = SM90::GMMA::ScaleOut::Zero;

        shared.k_barriers.wait_full(keys_at);
        work.for_each([&](int head, int m_block) __attribute__((always_inline)) {
          const int stage = uniform(at.stage);
          shared.q_barriers.wait_full(at);
          start_matmul(mma_s, tSrK, tSrQ(_, _, _, stage), tSrS, SM90::GMMA::ScaleOut::Zero);
          if (opening == SM90::GMMA::ScaleOut::Zero) shared.v_barriers.wait_full(keys_at);
          shared.dout_barriers.wait_full(at);
          start_matmul(mma_s, tSrV, tSrdO(_, _, _, stage), tSrdP, SM90::GMMA::ScaleOut::Zero);
          wait_matmul<1>(tSrS);

          const bool edge = partial || !work.queries.interior.contains(m_block);
          const ScoreTile<BackwardParams> score_tile{
              backward, {work.batch, head, work.n_block}, key, lengths.transposed()};
          if (edge || maps) {
            if constexpr (kKnowsSoftcap) {
              if (maps) score_tile.cap_or_stretch(scores, tScS, m_block * kM);
            } else {
              if (maps) score_tile.stretch(scores, tScS, m_block * kM);
            }
            if (edge) {
              score_tile.mask(scores, tScS, m_block * kM);
              CUTE_UNROLL
              for (int r = 0; r < size<0>(scores); ++r) {
                if (key + get<0>(tScS(r, 0)) < lengths.k) continue;  // what lies behind would add to dQ
                CUTE_UNROLL
                for (int c = 0; c < size<1>(scores); ++c) scores(r, c) = -kInfinity;
              }
            }
          }
          if (steep) [[unlikely]]
            relate_steep_rows(backward, scores, tScS, shared.statistics[stage][0],
                              std::int64_t(work.workspace_tile(backward, head, m_block)) * kM);
          // Exponents to weights, rounded for dV, and to what dP is multiplied with: the same, or under a cap its slope
          // too.
          auto weights = recast<std::uint32_t>(tVrP);
          const auto weigh = [&](auto&& slope) __attribute__((always_inline)) {
            for_column_pairs(tScS, shared.statistics[stage][0], [&](int c, float2 lse) {
              CUTE_UNROLL
              for (int r = 0; r < size<0>(scores); ++r) {
                const float a = exp2_approx(fmaf(scores(r, c), unit_log2, -lse.x));
                const float b = exp2_approx(fmaf(scores(r, c + 1), unit_log2, -lse.y));
                weights(c + r) = round_pair<Element>(a, b);
                scores(r, c) = a * slope(r, c);
                scores(r, c + 1) = b * slope(r, c + 1);
              }
            });
          };
          if (kKnowsSoftcap && backward.score_map.capped)
            weigh([&](int r, int c) { return score_tile.cap_slope(scores(r, c)); });
          else
            weigh([](int, int) { return 1.0f; });

          wait_matmul<0>(tSrdP);
          if (kKnowsDropout && backward.dropout.active()) {
            const auto kept = KeptOf<decltype(tScS)>::template of<Rows::kKeys>(backward.dropout, work.batch, head, tScS,
                                                                               key, m_block * kM);
            kept.keep_words(weights);
            kept.keep(other, backward.dropout.scale);
          }
          start_matmul(mma_kv, tVrP, tVrdO(_, _, _, stage), tVrdV, opening);
          for_column_pairs(tScS, shared.statistics[stage][1], [&](int c, float2 delta) {
            CUTE_UNROLL
            for (int r = 0; r < size<0>(scores); ++r) {
              const float2 weight =
                  kRoundedWeights ? unround<Element>(weights(c + r)) : float2{scores(r, c), scores(r, c + 1)};
              scores(r, c) = weight.x * (other(r, c) - delta.x);
              scores(r, c + 1) = weight.y * (other(r, c + 1) - delta.y);
            }
          });
          round_to(tSrS, tKrdS);
          shared.ds_empty[ds_at.stage].wait(ds_at.parity ^ 1);  // a new barrier counts as past its first round
          store_scores(tKrdS, place_of_scores, ds_at.stage);
          cute::tma_store_fence();  // what was stored is visible to matmuls
          __syncwarp();
          if (thread % 32 == 0) shared.ds_full[ds_at.stage].arrive();

          // dQ of the step before, for which the other warpgroup has had time: so the two need not keep step. In the
          // first there is none, and nothing comes of what is multiplied.
          if (started) shared.ds_full[dq_at.stage].wait(dq_at.parity);
          start_dq(uniform(dq_at.stage));
          start_matmul(mma_kv, tKrdS, tKrQ(_, _, _, stage), tKrdK, opening);
          wait_matmul<2>(tVrdV);
          shared.dout_barriers.release_by_warp(at);
          wait_matmul<1>(tQrdQ);
          if (started) finish_dq();
          wait_matmul<0>(tKrdK);
          shared.q_barriers.release_by_warp(at);
          at.advance();
          ds_at.advance();
          started = true;
          opening = SM90::GMMA::ScaleOut::One;
        });
        shared.ds_full[dq_at.stage].wait(dq_at.parity);
        if (kLoops) shared.v_barriers.release_by_warp(keys_at);
        start_dq(uniform(dq_at.stage));
        wait_matmul<0>(tQrdQ);
        if (kLoops) shared.k_barriers.release_by_warp(keys_at);
        if (kLoops) keys_at.advance();
        finish_dq();
        finish(work, tKrdK, tVrdV);
      });
    }

    /// A warpgroup's part of dQ: each thread's accumulators as they are, four by four, side by side.
    template <class Accumulator>
    CUTE_DEVICE void hand_over(Accumulator const& tQrdQ, int warpgroup) const {
      using namespace cute;
      float4* const part = reinterpret_cast<float4*>(shared.dq[warpgroup]) + thread % 128;
      CUTE_UNROLL
      for (int i = 0; i < size(tQrdQ); i += 4) part[i / 4 * 128] = {tQrdQ(i), tQrdQ(i + 1), tQrdQ(i + 2), tQrdQ(i + 3)};
      tma_store_fence();
      __syncwarp();
      if (thread % 32 == 0) shared.dq_full[warpgroup].arrive();
    }
  };
};

}  // namespace flashtile
