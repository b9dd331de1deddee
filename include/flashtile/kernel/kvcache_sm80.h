// Attention over a cache, for Ampere and later: few rows of queries against many keys, which is all reading.
//
// A tile holds all query heads of a group, so that keys and values are read once. Where it has 16 rows, each warp of a
// thread block goes through keys of its own, with a ring of its own, and waits for nobody; what the warps have found is
// joined at the end. SplitKeys says which keys a thread block has. Where those are not all of a tile's, its result is
// one of several parts, and whichever block comes last joins them: one launch, and nothing to clear before.
#pragma once

#include <cuda/atomic>
#include <cute/tensor.hpp>

#include "flashtile/append.h"
#include "flashtile/kvcache_params.h"
#include "flashtile/launch.h"
#include "flashtile/load/gather.h"
#include "flashtile/mainloop/forward_sm80.h"
#include "flashtile/math/part.h"
#include "flashtile/warp.h"

namespace flashtile {

/// What the mainloop of one group is.
constexpr Variant of_group(Variant v) {
  v.warps = warps_of_group(v);
  return v;
}

/// The scores of the keys that one group has: blocks of kN, every kGroups-th. As ScoreTile, for heads side by side.
template <int kN, int kGroups>
struct KvcacheScores {
  ScoreTile<KvcacheParams> tile;
  int group;
  /// Of a column among the group's keys: which it is among those of all groups.
  CUTE_DEVICE int column(int first_column) const { return first_column * kGroups + group * kN; }

  template <Softcaps kSoftcaps, class Scores, class Coord>
  CUTE_DEVICE void map(Scores& scores, Coord const& coord, int first_column) const {
    using namespace cute;
    KvcacheParams const& params = tile.params;
    if (params.score_map.capped) tile.template cap<kSoftcaps>(scores);
    if (!params.score_map.stretched) return;
    const float* slopes = params.alibi_slopes;
    if (slopes != nullptr)
      slopes += tile.tile.batch * params.alibi_batch_stride +
                tile.tile.head * params.packing.heads.value * params.alibi_head_stride;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const int row = tile.first_row + get<0>(coord(r, 0));
      const float slope = slopes == nullptr ? 0.0f : slopes[params.packing.head(row) * params.alibi_head_stride];
      const int to_diagonal = column(first_column) - tile.lengths.diagonal(params.packing.query(row));
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c)
        scores(r, c) = params.score_map.outer * scores(r, c) - slope * fabsf(float(to_diagonal + get<1>(coord(r, c))));
    }
  }

  template <class Scores, class Coord>
  CUTE_DEVICE void mask(Scores& scores, Coord const& coord, int first_column) const {
    tile.mask(scores, coord, column(first_column));
  }
};

/// Rows of a tile of one sequence, and of keys in the pages of a cache.
template <Variant kV>
struct KvcacheSource {
  using Params = KvcacheParams;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kGroups = groups_of(kV);
  using Mainloop = ForwardMainloopSm80<of_group(kV), KvcacheSource>;
  using Element = std::conditional_t<kV.dtype == DType::kFloat16, cute::half_t, cute::bfloat16_t>;

  KvcacheParams const& params;
  TileCoord tile;
  Span queries;
  int first_row;  // of the cache: that of key 0 of the part
  int end_row;
  int group;
  int thread;
  CachePolicy policy;
  Pages::Place place = find(0);  // of a warp: where a lane's row of the next block lies, looked up a block ahead

  template <class Shared>
  CUTE_DEVICE void load_q(Shared const& sQ, int thread) const {
    const int first = tile.m_block * kM;
    const Element* const origin = static_cast<const Element*>(params.q) +
                                  params.q_strides.at(tile.batch, queries.first) +
                                  tile.head * params.packing.heads.value * params.q_strides.head;
    const auto row_at = [&](int row) {
      return origin + params.packing.query(first + row) * params.q_strides.row +
             params.packing.head(first + row) * params.q_strides.head;
    };
    gather<typename Mainloop::Load>(CachePolicy(false), row_at, sQ, queries.used * params.packing.heads.value - first,
                                    params.head_dim, thread);
  }
  template <class Shared>
  CUTE_DEVICE void load_k(int block, Shared const& sK, int) const {
    load(params.k, params.k_strides, block, sK, params.head_dim);
  }
  template <class Shared>
  CUTE_DEVICE void load_v(int block, Shared const& sV, int) {
    load(params.v, params.v_strides, block, sV, params.head_dim_v);
    place = find(block + 1);
  }
  CUTE_DEVICE KvcacheScores<kN, kGroups> scores(Lengths lengths) const {
    return {{params, tile, tile.m_block * kM, lengths}, group};
  }

 private:
  static constexpr bool kLanePerRow = Mainloop::kThreads == 32 && kN <= 32;

  CUTE_DEVICE int first_of(int block) const { return first_row + (block * kGroups + group) * kN; }
  /// Of the lane's row of a block; one that there is, whatever block it is.
  CUTE_DEVICE Pages::Place find(int block) const {
    return kLanePerRow ? params.pages.at(tile.batch, min(first_of(block) + thread, end_row - 1)) : Pages::Place{};
  }

  template <class Shared>
  CUTE_DEVICE void load(const void* base, Strides const& strides, int block, Shared const& shared, int columns) const {
    const Element* const origin = static_cast<const Element*>(base) + tile.head * strides.head;
    const int first = first_of(block);
    const auto load = [&](auto&& row_at) {
      gather<typename Mainloop::Load>(policy, row_at, shared, end_row - first, columns, thread);
    };
    if constexpr (kLanePerRow) {
      const Element* const own = origin + strides.at(place.page, place.row);
      load([&](int row) { return of_lane(own, row); });
    } else {
      load([&](int row) {
        const Pages::Place place = params.pages.at(tile.batch, min(first + row, end_row - 1));
        return origin + strides.at(place.page, place.row);
      });
    }
  }
};

template <Variant kV>
struct KvcacheKernelSm80 {
  using Source = KvcacheSource<kV>;
  using Mainloop = typename Source::Mainloop;
  using Element = typename Source::Element;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr int kGroups = groups_of(kV);
  static constexpr int kThreads = kV.threads();
  static constexpr int kThreadsOfGroup = kThreads / kGroups;
  static constexpr int kItem = kGroups * kN;  // a block of keys for each group
  static constexpr int kChunksOfRow = kHeadDim / 4;

  /// What the groups have found, on its way from the threads that hold accumulators to those that hold chunks of rows.
  struct Exchange {
    float out[kGroups * kM][kHeadDim + 8];  // padded: rows of a warp in different banks
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
  TeamShares shares{};

  /// Part of the keys of one tile.
  struct Segment {
    int batch;
    int m_block;
    Span queries;
    int first_row;  // of the cache, of key 0
    SplitKeys::Tile tile;
    int first_item;  // of the tile's, among all
    Range items;     // of the tile
  };

  /// Where the parts of a tile lie, in the order of their keys. Teams leave at most two: what they begin with, and what
  /// they end with.
  struct Places {
    int count;
    int own;    // which part this team's is
    int first;  // place
    int next, step;

    CUTE_DEVICE int operator[](int n) const { return n == 0 ? first : next + (n - 1) * step; }
  };

  CUTE_DEVICE float unit_log2() const { return params.score_map.unit_log2; }
  CUTE_DEVICE static int group_of_thread() { return threadIdx.x / kThreadsOfGroup; }
  CUTE_DEVICE int rows(Segment const& s) const {
    const std::int64_t rows = std::int64_t(s.queries.size) * params.packing.heads.value - std::int64_t(s.m_block) * kM;
    return rows < kM ? int(rows) : kM;
  }

  /// Attends to `keys` of the segment's tile; leaves what each group has found in shared memory.
  CUTE_DEVICE void attend(Segment const& s, Range keys) const {
    using namespace cute;
    const int group = group_of_thread(), thread = threadIdx.x % kThreadsOfGroup;
    const Lengths lengths = {s.tile.lengths.q, s.tile.lengths.k - keys.begin};
    const int end = min(keys.end, s.tile.keys.end) - keys.begin;
    VisibleKeys<kN> visible;
    visible.first = 0;
    visible.count = end;
    visible.lengths = lengths;
    visible.blocks = every(Spans::tiles(max(end, 0), kN), group);
    const Range interior = s.tile.queries.empty() ? Range{} : params.band.tiles(s.tile.queries, kN, lengths).interior;
    visible.interior = {every(interior.begin, group), every(min(interior.end, end / kN), group)};

    const TileCoord tile = {s.batch, head, s.m_block};
    typename Mainloop::Softmax softmax(unit_log2());
    Tensor tOrO = partition_fragment_C(typename Mainloop::TiledMma{}, Shape<Int<kM>, Int<kHeadDim>>{});  // (mma, m, d)
    clear(tOrO);
    const int first_row = s.first_row + keys.begin;
    const CachePolicy policy(params.passes_by);
    if (visible.blocks > 0)
      Mainloop{params, shared.groups[group],
               tile,   visible,
               thread, Source{params, tile, s.queries, first_row, first_row + end, group, thread, policy}}
          .run(tOrO, softmax);
    softmax.finish_sums();

    Tensor cO = make_identity_tensor(Shape<Int<kM>, Int<kHeadDim>>{});
    Tensor tOcO = rows_and_columns(typename Mainloop::TiledMma{}.get_slice(thread).partition_C(cO));  // (row, column)
    Tensor rows_of_o = rows_and_columns(tOrO);
    __syncthreads();  // nobody still reads keys or queries
    Exchange& exchange = shared.exchange;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(tOcO); ++r) {
      const int row = group * kM + get<0>(tOcO(r, 0));
      CUTE_UNROLL
      for (int c = 0; c < size<1>(tOcO); c += 2)
        *reinterpret_cast<float2*>(&exchange.out[row][get<1>(tOcO(r, c))]) = {rows_of_o(r, c), rows_of_o(r, c + 1)};
      if (threadIdx.x % 4 == 0) exchange.state[row] = softmax.row[r];
    }
    __syncthreads();
  }

  /// Of blocks 0, 1, …: how many below `n` are a group's.
  CUTE_DEVICE static int every(int n, int group) { return n > group ? (n - group + kGroups - 1) / kGroups : 0; }

  /// What all groups have found.
  CUTE_DEVICE Part joined(int row, int column) const {
    Part part;
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g)
      part.join({*reinterpret_cast<const float4*>(&shared.exchange.out[g * kM + row][column]),
                 shared.exchange.state[g * kM + row]},
                unit_log2());
    return part;
  }

  /// Calls `visit(row, column)` for the chunks of the tile's rows that this thread has.
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
    const int query = params.packing.query(tile_row);
    const int head_q = head * params.packing.heads.value + params.packing.head(tile_row);
    FinishedRow finished;
    if (query < s.queries.used) {
      finished = part.state.finish(params.sinks == nullptr ? -kInfinity : params.sinks[head_q], params.score_map.unit);
      part.scale(finished.normaliser);
    } else {
      part = {};
    }
    Element* const to = static_cast<Element*>(params.out) + params.out_strides.at(s.batch, s.queries.first + query) +
                        head_q * params.out_strides.head + column;
    *reinterpret_cast<uint2*>(to) = {round_pair<Element>(part.o.x, part.o.y), round_pair<Element>(part.o.z, part.o.w)};
    if (params.lse != nullptr && column == 0)
      params.lse[params.lse_strides.at(s.batch, head_q, s.queries.first + query)] = finished.lse(params.score_map.unit);
  }

  CUTE_DEVICE Places places(Segment const& s) const {
    if (params.schedule.splits()) return {s.tile.items, s.items.begin, s.first_item, s.first_item + 1, 1};
    const int first = shares.team_of(s.first_item), last = shares.team_of(s.first_item + s.tile.items - 1);
    const int before = shares.first_item(first) == s.first_item ? 0 : 1;  // whether that team had another before
    return {last - first + 1, team - first, 2 * first + before, 2 * (first + 1), 2};
  }

  CUTE_DEVICE std::int64_t index_of(int place) const { return std::int64_t(place) * params.heads_k.value + head; }

  CUTE_DEVICE void store_part(int place, int row, int column, Part const& part) const {
    const std::int64_t index = index_of(place) * kM + row;
    *reinterpret_cast<float4*>(params.partials.out + index * kHeadDim + column) = part.o;
    if (column == 0) params.partials.state[index] = part.state;
  }

  CUTE_DEVICE Part load_part(int place, int row, int column) const {
    const std::int64_t index = index_of(place) * kM + row;
    const float2 state = __ldcg(reinterpret_cast<const float2*>(params.partials.state + index));
    return {__ldcg(reinterpret_cast<const float4*>(params.partials.out + index * kHeadDim + column)),
            {state.x, state.y}};
  }

  /// Where the parts of a tile are counted.
  CUTE_DEVICE MarkedCount arrivals(Places const& places) const {
    return {params.partials.arrivals + index_of(places.first), params.partials.mark};
  }

  /// Says that a part is written. Whether all are, which one thread block of a tile's is told, the last. Counting
  /// begins with 0, whatever was `found` there: whoever comes sees to it before it counts.
  CUTE_DEVICE bool hand_in(Places const& places, std::uint64_t found) const {
    bool last = false;
    __syncthreads();
    if (threadIdx.x == 0) {
      const MarkedCount arrived = arrivals(places);
      arrived.begin(found);
      last = arrived.add(cuda::memory_order_acq_rel) == places.count - 1;  // one fence, a light one
      if (last) arrived.clear();
    }
    return __syncthreads_or(last);
  }

  /// Joins the parts, and finishes the rows. Two threads share a chunk: those of even number and those of odd are
  /// joined apart, in their order, then both; so what sees no key at the end changes nothing, however many parts there
  /// are.
  CUTE_DEVICE void finish_joined(Segment const& s, Places const& places) const {
    constexpr int kAhead = 8;  // parts of a thread that are on their way together
    const int chunks = rows(s) * kChunksOfRow, odd = threadIdx.x % 2;
    CUTE_NO_UNROLL
    for (int first = 0; first < chunks; first += kThreads / 2) {
      const int chunk = first + threadIdx.x / 2;
      const int row = chunk / kChunksOfRow, column = chunk % kChunksOfRow * 4;
      const bool live = chunk < chunks && column < params.head_dim_v;
      const int count = live ? places.count : 0;
      Part sum;
      CUTE_NO_UNROLL
      for (int n = odd; n < count; n += 2 * kAhead) {
        Part some[kAhead];
        CUTE_UNROLL
        for (int i = 0; i < kAhead; ++i)
          if (n + 2 * i < count) some[i] = load_part(places[n + 2 * i], row, column);
        CUTE_UNROLL
        for (int i = 0; i < kAhead; ++i) sum.join(some[i], unit_log2());
      }
      sum.join(of_lane(sum, threadIdx.x % 32 | 1), unit_log2());
      if (live && !odd) finish(s, row, column, sum);
    }
  }

  /// Attends, and finishes the tile's rows where nothing is missing. One call of attend() serves all: its code is most
  /// of the kernel, and comes from memory too.
  CUTE_DEVICE void run(Segment const& s) const {
    SplitKeys const& schedule = params.schedule;
    const bool in_turn = schedule.splits() && !schedule.apart;  // all splits of the tile, one after the other
    const bool whole = in_turn || s.items.end - s.items.begin == s.tile.items;
    const int begin = s.tile.keys.begin + s.items.begin * s.tile.split;
    const int end = in_turn ? max(s.tile.keys.end, begin + 1) : s.tile.keys.begin + s.items.end * s.tile.split;
    const int step = in_turn ? s.tile.split : end - begin;
    const bool parts = !whole || step < end - begin;
    CUTE_NO_UNROLL
    for (int first = begin, n = 0; first < end; first += step, ++n) {
      attend(s, {first, first + step});
      Places places{};
      std::uint64_t found = 0;
      if (in_turn) {
        places = {min(n + 1, 2), n % 2, 2 * team, 2 * team + 1, 1};  // a sum of the even ones, one of the odd
      } else if (parts) {
        places = this->places(s);
        if (threadIdx.x == 0) found = arrivals(places).found();
      }
      for_chunks(s, [&](int row, int column) {
        Part part;
        if (n >= 2) part = load_part(places[places.own], row, column);
        part.join(joined(row, column), unit_log2());
        if (parts)
          store_part(places[places.own], row, column, part);
        else
          finish(s, row, column, part);
      });
      if (parts && (in_turn ? first + step >= end : hand_in(places, found))) {
        __syncthreads();  // all that this block has written can be seen
        finish_joined(s, places);
      }
      __syncthreads();  // nobody still reads what the groups have found
    }
  }
};

template <class Row>
__global__ void __launch_bounds__(Row::kVariant.threads()) kvcache_sm80(const __grid_constant__ KvcacheParams params) {
  using Kernel = KvcacheKernelSm80<Row::kVariant>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedStorage*>(shared_bytes);
  SplitKeys const& schedule = params.schedule;
  constexpr int kM = Kernel::kM, kItem = Kernel::kItem;

  // Each warp finds its thread block's share by itself, a lane looking at one sequence of 32: from one tile to the next
  // it is on the way to the first key.
  struct Sequence {
    Span queries;
    int first_row = 0;  // of the cache
    int tiles = 0;
    SplitKeys::Tile tile;  // the first
  };
  const int lane = threadIdx.x % 32;
  int held = 0;  // of the cache, by the lane's sequence: asked for before the code that needs it has come from memory
  if (lane < schedule.rows.batch) asm volatile("ld.global.b32 %0, [%1];" : "=r"(held) : "l"(schedule.rows.held + lane));
  if (schedule.queries.ragged()) {
    bool sorted = true;
    CUTE_NO_UNROLL
    for (int b = lane; b < schedule.queries.batch; b += 32) sorted &= schedule.sorted(b);
    if (!__all_sync(0xffffffff, sorted)) return;
  }

  // First all sequences are counted, then those are looked at again that the share may lie in; 32 are seen once.
  const int entries = schedule.queries.entries();
  Kernel kernel{params, shared, params.heads_k.quotient(blockIdx.x), params.heads_k.remainder(blockIdx.x)};
  typename Kernel::Segment s;
  int all = 0, line_end = 0;     // items of all sequences; and of those before, and with, these 32
  int item = 0, items_end = -1;  // the share, once it is known
  CUTE_NO_UNROLL
  for (int first = 0; first < entries && item != items_end; first += 32) {
    Sequence own;
    int items = 0;  // of all tiles
    if (first + lane < entries) {
      const int b = first + lane;
      if (first > 0) held = schedule.rows.held_of(b);
      const CachedRows::Rows rows = schedule.rows.at(b, held);
      own.queries = schedule.queries.at(b);
      own.first_row = rows.begin;
      own.tiles = schedule.tiles_of<kM>(own.queries);
      CUTE_NO_UNROLL
      for (int m = 0; m < own.tiles; ++m) {
        const SplitKeys::Tile tile = schedule.tile<kM, kItem>(own.queries, rows, m);
        if (m == 0) own.tile = tile;
        items += tile.items;
      }
    }
    if (items_end < 0) {
      all += items;
      if (first + 32 < entries) continue;
      kernel.shares = TeamShares::of(__reduce_add_sync(0xffffffff, all), schedule.teams);
      item = kernel.shares.first_item(kernel.team);
      items_end = kernel.shares.first_item(kernel.team + 1);
      if (first > 0) {
        held = schedule.rows.held_of(lane);
        first = -32;
        continue;
      }
    }

    int end = items;
    CUTE_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffff, end, distance);
      if (lane >= distance) end += other;
    }
    end += line_end;
    line_end = __shfl_sync(0xffffffff, end, 31);
    CUTE_NO_UNROLL
    while (item < min(items_end, line_end)) {
      const int found = __ffs(__ballot_sync(0xffffffff, end > item)) - 1;
      const Sequence sequence = of_lane(own, found);
      s.batch = first + found;
      s.first_item = __shfl_sync(0xffffffff, end - items, found);
      s.queries = sequence.queries;
      s.first_row = sequence.first_row;
      s.tile = sequence.tile;
      CUTE_NO_UNROLL
      for (s.m_block = 0; s.m_block < sequence.tiles && item < items_end; s.first_item += s.tile.items, ++s.m_block) {
        const int length = s.tile.lengths.k;
        if (s.m_block > 0)
          s.tile = schedule.tile<kM, kItem>(s.queries, {.begin = 0, .held = 0, .end = length}, s.m_block);
        CUTE_NO_UNROLL
        while (item < min(items_end, s.first_item + s.tile.items)) {
          const int begin = item - s.first_item;
          s.items = {begin, schedule.splits() ? begin + 1 : min(s.tile.items, items_end - s.first_item)};
          kernel.run(s);
          item = s.first_item + s.items.end;
        }
      }
    }
  }
}

template <class Row>
void launch_kvcache_sm80(const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream) {
  using Kernel = KvcacheKernelSm80<Row::kVariant>;
  static_assert(sizeof(typename Kernel::SharedStorage) == kvcache_shared_memory(Row::kVariant));
  static KernelHandles handles;
  append(plan, tensors, memory, stream);
  const KvcacheParams params = KvcacheParams::of(plan, tensors, memory, MarkedCount::new_mark());
  launch(kvcache_sm80<Row>, handles, plan.problem.device, {plan.grid, Row::kVariant.threads(), plan.shared_memory},
         params, stream);
}

}  // namespace flashtile
