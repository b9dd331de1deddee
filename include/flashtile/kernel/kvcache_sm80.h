// This kernel computes attention over a cache, for Ampere and later: few rows of queries against many keys, which is
// bound by memory bandwidth.
//
// A tile holds all query heads of a KV head's group, so that keys and values are read once. Where it has 16 rows, each
// warp of a thread block goes through keys of its own, with a ring buffer of its own, and waits for no other; the
// warps' results are joined at the end. SplitKeys says which keys a thread block has. Where those are not all of a
// tile's, its result is one of several parts (partial results), which the thread block that comes last joins: this
// takes one launch, and no memory has to be cleared before.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/append.h"
#include "flashtile/cuda/constants.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/cuda/warp.h"
#include "flashtile/kernel/kvcache_sm80/joining.h"
#include "flashtile/kernel/kvcache_sm80/shares.h"
#include "flashtile/kernel/kvcache_sm80/source.h"
#include "flashtile/kvcache_params.h"
#include "flashtile/mainloop/few_queries_sm80.h"
#include "flashtile/math/part.h"

namespace flashtile {

template <Variant kV, Calls kCalls>
struct KvcacheKernelSm80 {
  static constexpr bool kPlain = kCalls != Calls::kAll;
  using Source = KvcacheSource<kV, kPlain>;
  using Mainloop = typename Source::Mainloop;
  using Element = typename Source::Element;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kGroups = groups_of(kV);  // groups of warps: each has keys of its own
  static constexpr int kThreads = kV.threads();
  static constexpr int kThreadsOfGroup = kThreads / kGroups;
  static constexpr int kCounter = kThreads - 1;  // the thread that counts parts, which has least of them to write
  static constexpr int kItem = kGroups * kN;     // a block of keys for each group
  static constexpr int kChunksOfRow = kHeadDim / 4;
  using Segment = KvcacheSegment;

  /// Exchange takes the groups' results from the threads that hold accumulators to those that hold chunks of rows.
  struct Exchange {
    float out[kGroups * kM][kHeadDim + 8];  // padded so that rows of a warp lie in different banks
    RowState state[kGroups * kM];
  };
  union SharedStorage {
    typename Mainloop::SharedStorage groups[kGroups];
    Exchange exchange;
  };

  KvcacheParams const& params;
  SharedStorage& shared;
  int team;
  int head;  // KV head

  CUTE_DEVICE PartsInMemory<kM, kHeadDim> parts() const { return {params, head}; }
  CUTE_DEVICE float unit_log2() const { return params.scores.map.unit_log2; }
  CUTE_DEVICE static int group_of_thread() { return threadIdx.x / kThreadsOfGroup; }
  CUTE_DEVICE int rows(Segment const& s) const {
    const std::int64_t rows =
        std::int64_t(s.queries.size) * params.scores.packing.heads.value - std::int64_t(s.m_block) * kM;
    return rows < kM ? int(rows) : kM;
  }

  /// Attends to `keys` of the segment's tile, and leaves the result of each group in shared memory.
  CUTE_DEVICE void attend(Segment const& s, Range keys) const {
    using namespace cute;
    const int group = group_of_thread(), thread = threadIdx.x % kThreadsOfGroup;
    const Lengths lengths = {s.tile.lengths.q, s.tile.lengths.k - keys.begin};
    const int end = min(keys.end, s.tile.keys.end) - keys.begin;
    const Range visible_keys = {keys.begin, keys.begin + end};
    const BlockWalk walk =
        kPlain ? params.schedule.plain_walk(s.tile, visible_keys, kN) : params.schedule.walk(s.tile, visible_keys, kN);
    const VisibleKeys<kN> visible(walk.share(group, kGroups), end, lengths);

    const TileCoord tile = {s.batch, head, s.m_block};
    typename Mainloop::Softmax softmax(unit_log2());
    const int first_row = s.first_row + keys.begin;
    const CachePolicy policy(params.passes_by);
    const auto mainloop = [&] {
      return Mainloop{params, shared.groups[group],
                      tile,   visible,
                      thread, Source{params, tile, s.queries, first_row, first_row + end, group, thread, policy}};
    };
    if constexpr (Mainloop::kFew) {
      using Few = FewQueriesSm80<Mainloop>;
      typename Few::Out out;
      clear(out);
      if (visible.blocks > 0) Few{mainloop()}.run(out, softmax);
      softmax.finish_sums();
      raise_largest(s, softmax, thread < 4, [&](int r) { return 2 * thread + r; });
      __syncthreads();  // no thread still reads keys or queries, which the results replace
      Few::for_pairs(out, [&](int query, int column, float x, float y) {
        *reinterpret_cast<float2*>(&shared.exchange.out[group * kM + query][column]) = {x, y};
      });
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r)
        if (thread < 4) shared.exchange.state[group * kM + 2 * thread + r] = softmax.row[r];
      __syncthreads();  // all threads wait for the groups' results
      return;
    }
    Tensor tOrO = partition_fragment_C(typename Mainloop::TiledMma{}, Shape<Int<kM>, Int<kHeadDim>>{});  // (mma, m, d)
    clear(tOrO);
    if (visible.blocks > 0) mainloop().run(tOrO, softmax);
    softmax.finish_sums();

    Tensor cO = make_identity_tensor(Shape<Int<kM>, Int<kHeadDim>>{});
    Tensor tOcO = rows_and_columns(typename Mainloop::TiledMma{}.get_slice(thread).partition_C(cO));  // (row, column)
    Tensor rows_of_o = rows_and_columns(tOrO);
    raise_largest(s, softmax, thread % 4 == 0, [&](int r) { return get<0>(tOcO(r, 0)); });
    __syncthreads();  // no thread still reads keys or queries, which the results replace
    Exchange& exchange = shared.exchange;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(tOcO); ++r) {
      const int row = group * kM + get<0>(tOcO(r, 0));
      if constexpr (Mainloop::kFp8) {  // of 16 columns the first matmul has made the even ones, the second the odd ones
        CUTE_UNROLL
        for (int c = 0; c < size<1>(tOcO); c += 4) {
          const int column = get<1>(tOcO(r, c)), of_16 = column % 16;
          *reinterpret_cast<float4*>(&exchange.out[row][column + of_16]) = {rows_of_o(r, c), rows_of_o(r, c + 2),
                                                                            rows_of_o(r, c + 1), rows_of_o(r, c + 3)};
        }
      } else {
        CUTE_UNROLL
        for (int c = 0; c < size<1>(tOcO); c += 2)
          *reinterpret_cast<float2*>(&exchange.out[row][get<1>(tOcO(r, c))]) = {rows_of_o(r, c), rows_of_o(r, c + 1)};
      }
      if (threadIdx.x % 4 == 0) exchange.state[row] = softmax.row[r];
    }
    __syncthreads();  // all threads wait for the groups' results
  }

  /// Raises the largest logits of heads, if they are wanted, to those of the tile's rows `row_of(r)`, of which the
  /// thread has the r-th one. Of the threads that share rows, one `leads`.
  template <class RowOf>
  CUTE_DEVICE void raise_largest(Segment const& s, typename Mainloop::Softmax const& softmax, bool leads,
                                 RowOf&& row_of) const {
    if (kPlain || !params.largest.wanted()) return;
    // The asm hides the value from the compiler, which would compute what follows from it for every call.
    int first_row = s.m_block * kM;
    asm volatile("" : "+r"(first_row));
    CUTE_UNROLL
    for (int r = 0; r < Mainloop::Softmax::kRowCount; ++r) {
      const float logit = softmax.largest_of_row(r) * params.scores.map.unit;
      const int row = first_row + row_of(r);
      if (!leads || params.scores.packing.query(row) >= s.queries.used) continue;
      const int head_q = head * params.scores.packing.heads.value + params.scores.packing.head(row);
      if (logit > params.largest.so_far(s.batch, head_q)) params.largest.raise(s.batch, head_q, logit);
    }
  }

  /// Returns the results of all groups, joined.
  CUTE_DEVICE Part joined(int row, int column) const {
    Part part;
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g)
      part.join({*reinterpret_cast<const float4*>(&shared.exchange.out[g * kM + row][column]),
                 shared.exchange.state[g * kM + row]},
                unit_log2());
    return part;
  }

  /// Calls `visit(row, column)` for the chunks, four columns each, of the tile's rows that this thread has.
  template <class Visit>
  CUTE_DEVICE void for_chunks(Segment const& s, Visit&& visit) const {
    const int chunks = rows(s) * kChunksOfRow;
    CUTE_NO_UNROLL
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
      const int row = chunk / kChunksOfRow, column = chunk % kChunksOfRow * 4;
      if (column < params.head_dim_v) visit(row, column);
    }
  }

  /// Writes the finished output of a chunk, and the row's lse.
  CUTE_DEVICE void finish(Segment const& s, int row, int column, Part part) const {
    const int tile_row = s.m_block * kM + row;
    const int query = params.scores.packing.query(tile_row);
    const int head_q = head * params.scores.packing.heads.value + params.scores.packing.head(tile_row);
    RowTotal total;
    if (kCalls == Calls::kOneTileEach || query < s.queries.used) {
      total = part.state.total(params.sinks == nullptr ? -kInfinity : params.sinks[head_q], params.scores.map.unit);
      part.scale(total.normaliser);
    } else {
      part = {};
    }
    Element* const to = static_cast<Element*>(params.out) + params.out_strides.at(s.batch, s.queries.first + query) +
                        head_q * params.out_strides.head + column;
    *reinterpret_cast<uint2*>(to) = {rounded(part.o.x, part.o.y), rounded(part.o.z, part.o.w)};
    if (params.lse != nullptr && column == 0)
      params.lse[params.lse_strides.at(s.batch, head_q, s.queries.first + query)] =
          total.finished().lse(params.scores.map.unit);
  }

  /// Rounds to the dtype of out, of which both have 16 bits.
  CUTE_DEVICE std::uint32_t rounded(float low, float high) const {
    if (Mainloop::kFp8 && params.is_bf16) return round_pair<cutlass::bfloat16_t>(low, high);
    return round_pair<Element>(low, high);
  }

  /// Joins the parts and finishes the rows. Two threads share a chunk: even and odd parts are joined apart, in their
  /// order, and then both sums. So parts at the end that see no key change nothing, however many there are.
  CUTE_DEVICE void finish_joined(Segment const& s, PlacesOfParts const& places) const {
    const int chunks = rows(s) * kChunksOfRow, odd = threadIdx.x % 2;
    CUTE_NO_UNROLL
    for (int first = 0; first < chunks; first += kThreads / 2) {
      const int chunk = first + threadIdx.x / 2;
      const int row = chunk / kChunksOfRow, column = chunk % kChunksOfRow * 4;
      const bool live = chunk < chunks && column < params.head_dim_v;
      const int count = live ? places.count : 0;
      Part sum = parts().join_every_second(places, odd, count, row, column, unit_log2());
      sum.join(of_lane(sum, threadIdx.x % 32 | 1), unit_log2());
      if (live && !odd) finish(s, row, column, sum);
    }
  }

  /// Attends to a segment, and finishes the tile's rows where no part is missing. One call of attend() serves all
  /// cases, as its code is most of the kernel and takes time to be fetched into the instruction cache.
  CUTE_DEVICE void run(Segment const& s, TeamShares const& shares) const {
    SplitKeys const& schedule = params.schedule;
    // One thread block takes all splits of the tile, in order, where they do not lie apart.
    const bool in_turn = !kPlain && schedule.splits() && !schedule.apart;
    const bool whole = in_turn || s.items.end - s.items.begin == s.tile.items;
    const int begin = s.tile.keys.begin + s.items.begin * s.tile.split;
    const int end = in_turn ? max(s.tile.keys.end, begin + 1) : s.tile.keys.begin + s.items.end * s.tile.split;
    const int step = in_turn ? s.tile.split : end - begin;
    const bool in_parts = !whole || step < end - begin;
    int first = begin, n = 0;
    do {
      attend(s, {first, first + step});
      PlacesOfParts places{};
      if (in_turn) {
        places = {min(n + 1, 2), n % 2, 2 * team, 2 * team + 1, 1};  // one sum of the even splits, one of the odd
      } else if (in_parts) {
        places = PlacesOfParts::of(s, schedule.splits(), team, shares);
        if (threadIdx.x == kCounter) parts().begin_count(places);
      }
      for_chunks(s, [&](int row, int column) {
        Part part;
        if (n >= 2) part = parts().load(places[places.own], row, column);
        part.join(joined(row, column), unit_log2());
        if (in_parts)
          parts().store(places[places.own], row, column, part);
        else
          finish(s, row, column, part);
      });
      if (in_parts && (in_turn ? first + step >= end : parts().hand_in(places, kCounter))) {
        __syncthreads();  // all threads see what this thread block has written
        finish_joined(s, places);
      }
      __syncthreads();       // no thread still reads the groups' results
      if (!in_turn) return;  // the step has taken all
      first += step, ++n;
    } while (first < end);
  }
};

template <class Row, Calls kCalls>
__global__ void __launch_bounds__(Row::kVariant.threads(), blocks_of_multiprocessor(Row::kVariant))
    kvcache_sm80(const __grid_constant__ KvcacheParams params) {
  using Kernel = KvcacheKernelSm80<Row::kVariant, kCalls>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedStorage*>(shared_bytes);
  if (threadIdx.x < 32) prefetch_constants(params);
  const int team = params.heads_k.quotient(blockIdx.x), head = params.heads_k.remainder(blockIdx.x);
  const Kernel kernel{params, shared, team, head};
  __shared__ int items_of_section[32];
  KvcacheShare<Kernel::kM, Kernel::kItem, Row::kVariant.warps, kCalls>{params.schedule, items_of_section, team}
      .for_each([&](KvcacheSegment const& segment, TeamShares const& shares)
                    __attribute__((always_inline)) { kernel.run(segment, shares); });
}

template <class Row>
void launch_kvcache_sm80(const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream) {
  constexpr Variant kV = Row::kVariant;
  static_assert(sizeof(typename KvcacheKernelSm80<kV, Calls::kAll>::SharedStorage) == kvcache_shared_memory(kV));
  static KernelHandles all, plain, of_one_tile_each;
  append(plan, tensors, memory, stream);
  const KvcacheParams params = KvcacheParams::of(plan, tensors, memory, MarkedCount::new_mark());
  const LaunchShape shape{plan.grid, kV.threads(), plan.shared_memory};
  if constexpr (kV.tile_m <= 16) {  // larger tiles are seldom short of time for so few instructions
    const Calls calls = params.calls(kV.tile_m);
    if (calls == Calls::kPlain)
      return launch(kvcache_sm80<Row, Calls::kPlain>, plain, plan.problem.device, shape, params, stream);
    if (calls == Calls::kOneTileEach)
      return launch(kvcache_sm80<Row, Calls::kOneTileEach>, of_one_tile_each, plan.problem.device, shape, params,
                    stream);
  }
  launch(kvcache_sm80<Row, Calls::kAll>, all, plan.problem.device, shape, params, stream);
}

}  // namespace flashtile
