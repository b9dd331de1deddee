#include "flashtile/mask_words.h"

#include "flashtile/cuda/launch.h"

namespace flashtile {
namespace {

// A thread block finds one word of each kind for some tiles: a warp for each of the 32 blocks that the words have bits
// for, whose lanes ask the columns, of the block or of the tile.
constexpr int kThreads = 32 * MaskWords::kBlocks;
constexpr int kTiles = 4;

struct MaskWordsParams {
  MaskWords words;
  TilesOf tiles;
  int width;   // of a block
  int joined;  // masks of an entry that have tiles in common
  ColumnRanges columns;
  Band band;
  Sequences sequences;
};

/// Returns the kind of a block of `keys` for the tile, or for a block of `queries` the kind of the tile. All lanes of a
/// warp call it.
__device__ BlockKind find_kind(MaskWordsParams const& params, int batch, Sequence const& sequence, int mask,
                               Range queries, Range keys) {
  SeenColumn seen;
  for (int m = mask * params.joined; m < (mask + 1) * params.joined; ++m) {
    const HiddenRows* const columns = params.columns.of_mask(batch, m, sequence.k);
    for (int column = keys.begin + threadIdx.x % 32; column < keys.end; column += 32)
      seen = seen | SeenColumn::of(columns[column], column, queries, params.band, sequence.lengths());
  }
  const bool shown = __any_sync(0xffffffff, seen.shown), hidden = __any_sync(0xffffffff, seen.hidden);
  return SeenColumn{shown, hidden}.kind();
}

__global__ void __launch_bounds__(kThreads) find_mask_words_kernel(const __grid_constant__ MaskWordsParams params) {
  let_next_kernel_start();
  __shared__ BlockKind kinds[kTiles][MaskWords::kBlocks];
  const MaskWords& words = params.words;
  const bool of_keys = params.tiles == TilesOf::kKeys;
  const Spans& spans = of_keys ? params.sequences.k : params.sequences.q;
  const int chunks = Spans::tiles(words.places, kTiles), group = int(blockIdx.x) / words.words;
  const int word = int(blockIdx.x) - group * words.words, mask = group / chunks;
  const int first_place = (group - mask * chunks) * kTiles, tiles = min(kTiles, words.places - first_place);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto range = [](int block, int size, int end) { return Range{block * size, min((block + 1) * size, end)}; };
  for (int i = 0; i < tiles; ++i) {
    const int batch = spans.entry_of(first_place + i, words.rows);
    const Sequence sequence = params.sequences.at(batch);
    const Span &own = of_keys ? sequence.k : sequence.q, &others = of_keys ? sequence.q : sequence.k;
    const int tile = first_place + i - spans.first_place(batch, own.first, words.rows);
    const Range rows = range(tile, words.rows, own.used);
    const Range block = range(word * MaskWords::kBlocks + warp, params.width, others.used);
    BlockKind kind = BlockKind::kSkip;
    if (!rows.empty() && !block.empty())
      kind = find_kind(params, batch, sequence, mask, of_keys ? block : rows, of_keys ? rows : block);
    // Keys behind the last one are hidden, too.
    if (kind == BlockKind::kInterior && !of_keys && block.end - block.begin < params.width) kind = BlockKind::kEdge;
    if (lane == 0) kinds[i][warp] = kind;
  }
  __syncthreads();  // the first warps wait for the kinds that all have found
  if (warp >= tiles) return;
  const BlockKind kind = kinds[warp][lane];
  const unsigned edges = __ballot_sync(0xffffffff, kind == BlockKind::kEdge);
  const unsigned interiors = __ballot_sync(0xffffffff, kind == BlockKind::kInterior);
  if (lane != 0) return;
  std::uint32_t* const of_tile = words.of_place(first_place + warp, mask);
  of_tile[word] = interiors;
  of_tile[words.words + word] = edges;
}

}  // namespace

void find_mask_words(const MaskWords& words, TilesOf tiles, int width, const ColumnRanges& columns,
                     const Problem& problem, const Sequences& sequences, Stream stream) {
  static KernelHandles handles;
  const int grid = words.words * Spans::tiles(words.places, kTiles) * words.masks;
  const int joined = words.masks == 0 ? 1 : problem.masks_of_entry / words.masks;
  launch(find_mask_words_kernel, handles, problem.device, {grid, kThreads, 0},
         MaskWordsParams{words, tiles, width, joined, columns, problem.band, sequences}, stream);
}

}  // namespace flashtile
