#include "flashtile/mask_words.h"

#include "flashtile/cuda/launch.h"
#include "flashtile/scheduler/list_tiles.h"

namespace flashtile {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

struct MaskBoundsParams {
  MaskTables tables;
  ColumnRanges columns;
  Spans keys;
};

/// Finds the bounds of a block of keys, by a warp.
__global__ void __launch_bounds__(kThreads) find_mask_bounds_kernel(const __grid_constant__ MaskBoundsParams params) {
  let_next_kernel_start();
  const MaskTables& tables = params.tables;
  const int index = int(blockIdx.x) * kWarps + int(threadIdx.x / 32), mask = index / tables.places;
  if (mask >= tables.masks) return;
  const int place = index - mask * tables.places, batch = params.keys.entry_of(place, tables.tile_n);
  const Span keys = params.keys.at(batch);
  const int first = (place - params.keys.first_place(batch, keys.first, tables.tile_n)) * tables.tile_n;
  const int end = min(first + tables.tile_n, keys.used);
  const HiddenRows* const columns = params.columns.of_mask(batch, mask, keys);
  HiddenBounds bounds;
#pragma unroll 4
  for (int column = first + int(threadIdx.x % 32); column < end; column += 32) bounds.add(columns[column]);
  for (HiddenBounds::Ranges* ranges : {&bounds.first, &bounds.second})
    for (HiddenBounds::Ends* ends : {&ranges->begin, &ranges->end})
      *ends = {__reduce_min_sync(0xffffffff, ends->least), __reduce_max_sync(0xffffffff, ends->most)};
  if (threadIdx.x % 32 == 0) tables.bounds[index] = bounds;
}

struct MaskWordsParams {
  MaskTables tables;
  MaskWords words;  // those to be found
  bool of_keys;     // whether they are those of tiles of keys
  int width;        // of a block of the other side
  int joined;       // masks of an entry that have tiles in common
  ColumnRanges columns;
  Band band;
  Sequences sequences;
};

/// Returns what a tile sees of some columns, each of which is asked. All lanes of a warp call it.
__device__ SeenColumn ask(const HiddenRows* columns, Range block, Range rows, Band band, Lengths lengths) {
  SeenColumn seen;
#pragma unroll 4
  for (int column = block.begin + int(threadIdx.x % 32); column < block.end; column += 32)
    seen = seen | SeenColumn::of(columns[column], column, rows, band, lengths);
  return {__any_sync(0xffffffff, seen.shown) != 0, __any_sync(0xffffffff, seen.hidden) != 0};
}

/// Finds one word of each kind of a tile, by a warp: a lane has one of the 32 blocks. What the bounds of keys leave
/// open, all lanes ask together.
__global__ void __launch_bounds__(kThreads) find_mask_words_kernel(const __grid_constant__ MaskWordsParams params) {
  let_next_kernel_start();
  const MaskWords& words = params.words;
  const int lane = threadIdx.x % 32;
  const int index = int(blockIdx.x) * kWarps + int(threadIdx.x / 32), line = index / words.words;
  const int word = index - line * words.words, mask = line / words.places, place = line - mask * words.places;
  if (mask >= words.masks) return;
  const Spans& spans = params.of_keys ? params.sequences.k : params.sequences.q;
  const int batch = spans.entry_of(place, words.rows);
  const Sequence sequence = params.sequences.at(batch);
  const Lengths lengths = sequence.lengths();
  const Span own = params.of_keys ? sequence.k : sequence.q, others = params.of_keys ? sequence.q : sequence.k;
  const auto range = [](int block, int size, int end) { return Range{block * size, min((block + 1) * size, end)}; };
  const Range tile = range(place - spans.first_place(batch, own.first, words.rows), words.rows, own.used);
  const auto range_of_lane = [&](int lane) {
    return range(word * MaskWords::kBlocks + lane, params.width, others.used);
  };
  const Range block = range_of_lane(lane);
  const bool there = !tile.empty() && !block.empty();
  const auto keys_of = [&](Range block) { return params.of_keys ? tile : block; };
  const auto queries_of = [&](Range block) { return params.of_keys ? block : tile; };

  const int block_of_keys =
      params.of_keys ? place : params.sequences.k.first_place(batch, sequence.k.first, params.width) + word * 32 + lane;
  await_kernel_before();  // which finds the bounds
  SeenColumn seen;
  for (int m = mask * params.joined; m < (mask + 1) * params.joined; ++m) {
    KindByBounds found{BlockKind::kSkip, true};
    if (there)
      found = kind_by_bounds(params.tables.bounds[std::int64_t(m) * params.tables.places + block_of_keys],
                             keys_of(block), queries_of(block), params.band, lengths);
    SeenColumn of_mask{found.kind != BlockKind::kSkip, found.kind != BlockKind::kInterior};
    const HiddenRows* const columns = params.columns.of_mask(batch, m, sequence.k);
    for (unsigned open = __ballot_sync(0xffffffff, !found.certain); open != 0; open &= open - 1) {
      const int asking = lowest_bit_of(open);
      const Range asked = range_of_lane(asking);
      const SeenColumn answer = ask(columns, keys_of(asked), queries_of(asked), params.band, lengths);
      if (lane == asking) of_mask = answer;
    }
    seen = seen | of_mask;
  }
  BlockKind kind = there ? seen.kind() : BlockKind::kSkip;
  // Keys behind the last one are hidden, too.
  if (kind == BlockKind::kInterior && !params.of_keys && block.end - block.begin < params.width)
    kind = BlockKind::kEdge;
  const unsigned interiors = __ballot_sync(0xffffffff, kind == BlockKind::kInterior);
  const unsigned edges = __ballot_sync(0xffffffff, kind == BlockKind::kEdge);
  std::uint32_t* const of_tile = words.of_place(place, mask);
  if (lane == 0) of_tile[word] = interiors, of_tile[words.words + word] = edges;
}

struct MaskOrderParams {
  MaskWords words;
  MaskOrder order;
  TilesAtOnce at_once;
};

constexpr int kMostOrdered = 1 << 14;  // tiles of an entry; of more the order stays as it is
// Sections come in parts where the longest tile takes so many times as long as a section, and as the mean tile. Else
// what would be left of it when all other tiles of the last section are done costs less than what is loaded again for
// each part. The host does not know the work of tiles, so this is chosen here and not in select. The numbers are fitted
// to runs on an H100 (docs/performance.md).
constexpr float kOfSection = 1.5f, kOfMean = 1.5f;

/// Returns how many blocks the tile at a place visits, for all masks together.
__device__ int work_of(MaskWords const& words, int place) {
  int blocks = 0;
  for (int mask = 0; mask < words.masks; ++mask) blocks += words.count(words.of_place(place, mask));
  return blocks;
}

/// Says whether sections come in parts. All threads of a block call it.
__device__ bool come_in_parts(MaskOrderParams const& params, int entries) {
  __shared__ int longest;
  __shared__ float sum;
  if (threadIdx.x == 0) longest = 0, sum = 0;
  __syncthreads();
  int own_longest = 0;
  unsigned own_sum = 0;
  for (int place = threadIdx.x; place < params.words.places; place += kThreads) {
    const int blocks = work_of(params.words, place);
    own_longest = max(own_longest, blocks);
    own_sum += unsigned(blocks);
  }
  // A lane for each warp, as threads that add to the same place of shared memory wait for each other.
  own_longest = __reduce_max_sync(0xffffffff, own_longest);
  own_sum = __reduce_add_sync(0xffffffff, own_sum);
  if (threadIdx.x % 32 == 0) atomicMax(&longest, own_longest), atomicAdd(&sum, float(own_sum));
  __syncthreads();  // all threads wait for the sum
  const float of_section = float(params.at_once.heads) * sum / float(entries * params.at_once.thread_blocks);
  const float mean = sum / float(params.words.places);
  return of_section > 0 && float(longest) > fmaxf(kOfSection * of_section, kOfMean * mean);
}

/// Puts the tiles of a batch entry in order, by a thread block: a place is the number of tiles that come before, which
/// are shorter, or lie before and are as long.
__global__ void __launch_bounds__(kThreads) order_mask_tiles_kernel(const __grid_constant__ MaskOrderParams params) {
  let_next_kernel_start();
  __shared__ alignas(4) unsigned char lengths[kMostOrdered];  // eight to an octave
  const MaskWords& words = params.words;
  const int entries = int(gridDim.x), tiles = words.places / entries, first = int(blockIdx.x) * tiles;
  int* const order = params.order.at + 1 + first;
  await_kernel_before();  // which finds the words
  if (blockIdx.x == 0) {
    const bool in_parts = come_in_parts(params, entries);
    if (threadIdx.x == 0) *params.order.at = in_parts;
  }
  if (tiles > kMostOrdered) {
    for (int tile = threadIdx.x; tile < tiles; tile += kThreads) order[tile] = tile;
    return;
  }
  const int padded = (tiles + 3) / 4 * 4;
  for (int tile = threadIdx.x; tile < padded; tile += kThreads) {
    constexpr int kLast = RaggedOrder::kClasses - 1;  // what is behind the last tile comes after all of them
    lengths[tile] = static_cast<unsigned char>(tile < tiles ? kLast - class_of(work_of(words, first + tile)) : kLast);
  }
  __syncthreads();  // all threads wait for the lengths
  const auto* const fours = reinterpret_cast<const unsigned*>(lengths);
  for (int tile = threadIdx.x; tile < tiles; tile += kThreads) {
    const unsigned own = lengths[tile] * 0x01010101u;
    int before = 0;
    for (int four = 0; four < padded / 4; ++four) {
      unsigned come_before = __vcmpltu4(fours[four], own);
      const int earlier = tile - 4 * four;  // tiles of the four that lie before this one, if more than 0
      if (earlier > 0) come_before |= __vcmpeq4(fours[four], own) & (earlier < 4 ? (1u << 8 * earlier) - 1 : ~0u);
      before += __popc(come_before);
    }
    order[before / 8] = tile;
  }
}

}  // namespace

void find_mask_tables(const MaskTables& tables, const Variant& variant, const ColumnRanges& columns,
                      const Problem& problem, const Sequences& sequences, TilesAtOnce at_once, Stream stream) {
  static KernelHandles of_bounds, of_words, of_order;
  const auto shape = [](std::int64_t warps, bool early) {
    return LaunchShape{static_cast<int>((warps + kWarps - 1) / kWarps), kThreads, 0, early};
  };
  launch(find_mask_bounds_kernel, of_bounds, problem.device, shape(std::int64_t{tables.masks} * tables.places, false),
         MaskBoundsParams{tables, columns, sequences.k}, stream);
  for (const bool of_keys : {true, false}) {
    const MaskWords& words = of_keys ? tables.keys : tables.queries;
    const std::int64_t warps = std::int64_t{words.words} * words.places * words.masks;
    if (warps == 0) continue;
    const int width = of_keys ? queries_of_step(variant) : variant.tile_n;
    launch(find_mask_words_kernel, of_words, problem.device, shape(warps, variant.arch == Arch::kSm90),
           MaskWordsParams{tables, words, of_keys, width, tables.masks / words.masks, columns, problem.band, sequences},
           stream);
  }
  if (!tables.ordered || tables.queries.places == 0) return;
  launch(order_mask_tiles_kernel, of_order, problem.device,
         LaunchShape{problem.batch, kThreads, 0, variant.arch == Arch::kSm90},
         MaskOrderParams{tables.queries, tables.order, at_once}, stream);
}

}  // namespace flashtile
