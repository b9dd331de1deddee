// This file makes the plan of attention over a cache: how its keys are divided among thread blocks, and the memory it
// takes.
#include <algorithm>

#include "cpu/cpu.h"
#include "flashtile/flashtile.h"
#include "select/choose.h"
#include "select/plans.h"
#include "select/work.h"

namespace flashtile {
namespace {

constexpr int kKeysOfSplit = 1024;                  // keys of a split in a batch-invariant call, and of its steps
constexpr std::int64_t kRoomForSplits = 256 << 20;  // limit in bytes of the results of concurrent splits

/// These constants are fitted to runs on an H200 (docs/performance.md).
namespace h200 {

constexpr std::int64_t kSmallCache = 200 << 20;  // a cache is small up to this many bytes
constexpr int kFewRows = 16;                     // a tile of no more rows is bound by reading its keys
constexpr int kFewestKeys = 512;                 // least keys of a larger tile that are worth a thread block

}  // namespace h200

/// These were read off a dozen shapes on H100s (docs/performance.md), before tiles of few rows had an estimate of their
/// own, `blocks_of_tile`. Tiles of many rows still go by them.
namespace h100 {

constexpr int kFewestOfTile = 4;     // with fewer thread blocks for a tile, whole numbers of them leave too many idle
constexpr int kBlocksOfGoingOn = 1;  // a share that goes on to a second tile takes as long as one with so many more

}  // namespace h100

/// Returns how many parts of size `part` make up the whole.
std::int64_t parts(std::int64_t whole, std::int64_t part) {
  return (whole + part - 1) / part;
}

std::int64_t key_blocks(const KvcachePlan& plan) {
  return key_blocks(plan.variant, plan.problem);
}

/// Refuses what a GPU cannot count in an int, and returns the number of query tiles of a KV head: of ragged queries how
/// many there are at the most.
std::int64_t counted_tiles(const KvcachePlan& plan) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  // Warps that count sequences by sections look beyond the last one (see KvcacheShare).
  if (p.batch >= Band::kUnbounded)
    throw Unsupported("q has " + std::to_string(p.batch) + " sequences, expected fewer than 2^30");
  std::int64_t tiles = countable("q", tiles_of_rows(p, v, plan.packed_heads), "tiles of rows");
  if (plan.comes_second())
    tiles = std::min(tiles, p.batch * parts(std::int64_t{plan.most_queries} * plan.packed_heads, v.tile_m));
  countable("q", tiles * std::max<std::int64_t>(key_blocks(plan), 1), "items (tiles of rows × blocks of keys)");
  countable("q", parts(rows_of_sequence(p), v.tile_m) * v.tile_m, "rows (queries × heads of a group, in whole tiles)");
  return tiles;
}

/// Returns how many keys a split of a batch-invariant call has. Splits are joined in an order that begins with a tile's
/// first one (see finish_joined in kvcache_sm80.h). Under a window that may be a split before the one that a row's own
/// keys begin with, if these begin within the first ones of a split: then that one has them all, and there is nothing
/// to join. Where a cache has room for fewer keys than that, the first split has all there are, whatever the room. The
/// rows of a tile may be as many queries.
int keys_of_split(const KvcachePlan& plan) {
  const Problem& p = plan.problem;
  if (p.band.left == Band::kUnbounded) return kKeysOfSplit;
  const std::int64_t keys_of_tile = std::int64_t{p.band.left} + p.band.right + plan.variant.tile_m;
  const std::int64_t wanted = std::clamp<std::int64_t>(keys_of_tile, 1, std::max(p.seqlen_k, 1));
  return static_cast<int>(parts(wanted, kKeysOfSplit) * kKeysOfSplit);
}

/// Returns how many tiles a KV head has if all sequences are `like` a dense batch's, which is what plans go by: a token
/// of each sequence is a tile, also where queries are ragged.
std::int64_t expected_tiles(const Variant& v, const Problem& like) {
  return tiles_of_rows(like, v, like.group());
}

/// Sets how the keys of each tile are split. Returns the number of splits, or 0 where thread blocks share the keys of
/// all tiles evenly.
std::int64_t plan_splits(KvcachePlan& plan, const Problem& like, std::int64_t tiles, const DeviceInfo& device) {
  const bool invariant = plan.cache.batch_invariant;
  const bool whole = !invariant && plan.cache.num_splits == 0 &&
                     takes_whole_tiles(plan.variant, like, expected_tiles(plan.variant, like) * like.heads_k, device);
  plan.num_splits = static_cast<int>(std::min(std::int64_t{whole ? 1 : plan.cache.num_splits}, key_blocks(plan)));
  plan.keys_of_split = invariant ? keys_of_split(plan) : 0;
  const std::int64_t of_length = invariant ? parts(plan.problem.seqlen_k, plan.keys_of_split) : 0;
  const std::int64_t splits = plan.num_splits > 0 ? plan.num_splits : of_length;
  const std::int64_t place_bytes = kvcache_place_bytes(plan.variant) * plan.problem.heads_k;
  plan.splits_apart = splits > 1 && tiles * splits <= kRoomForSplits / place_bytes;
  return splits;
}

/// Returns into how many pieces the keys of all tiles of a KV head can be cut, if each is to be worth a thread block.
std::int64_t pieces(const KvcachePlan& plan, std::int64_t tiles, std::int64_t splits) {
  if (plan.splits_apart) return tiles * splits;
  if (splits > 0) return tiles;
  const bool few_rows = plan.variant.tile_m <= h200::kFewRows;
  const std::int64_t of_tile = few_rows ? key_blocks(plan) : parts(plan.problem.seqlen_k, h200::kFewestKeys);
  return tiles * std::max<std::int64_t>(of_tile, 1);
}

/// Returns how many thread blocks share so many tiles of many rows: as many for each, up to `most` in all, so that no
/// share of equally long sequences goes on from one tile to the next, unless this makes shares longer by more than what
/// going on costs. Of the numbers with which the longest share is as long, the least leaves fewest parts to join.
std::int64_t teams_of_many_rows(std::int64_t most, std::int64_t tiles, std::int64_t blocks) {
  if (tiles > 1 && most < h100::kFewestOfTile * tiles) return most;
  const std::int64_t of_tile = parts(blocks, most / tiles);  // blocks of a share that ends with its tile
  if (of_tile > parts(tiles * blocks, most) + h100::kBlocksOfGoingOn) return most;
  return tiles * parts(blocks, of_tile);
}

/// Returns how many thread blocks share the work of a KV head: one wave, or fewer where each would have too little to
/// do. Thread blocks of the same index, one for each KV head, form a team: see SplitKeys.
std::int64_t teams(const KvcachePlan& plan, const Problem& like, const DeviceInfo& device, std::int64_t tiles,
                   std::int64_t splits) {
  const std::int64_t wave = blocks_at_a_time(plan.variant, device), heads = plan.problem.heads_k;
  const std::int64_t all = std::max<std::int64_t>(pieces(plan, tiles, splits), 1);
  const std::int64_t most = std::clamp<std::int64_t>(wave / heads, 1, all), blocks = key_blocks(plan);
  if (splits > 0 || tiles == 0 || blocks == 0) return most;
  if (plan.variant.tile_m > h200::kFewRows) return teams_of_many_rows(most, tiles, blocks);
  if (groups_of(plan.variant) == 1 || tiles * heads > wave) return most;
  const int of_tile = blocks_of_tile(plan.variant, like, tiles * heads, device);
  return of_tile == 0 ? most : tiles * of_tile;
}

/// Returns how many slots a KV head has for partial results. Where teams share keys evenly, each has a slot for the
/// tile that it begins with and one for the tile that it ends with. Where a team computes the splits of a tile one
/// after the other, it has two for its running sums.
int partials(const KvcachePlan& plan, std::int64_t tiles, std::int64_t splits) {
  if (plan.splits_apart) return static_cast<int>(tiles * splits);
  return splits == 1 ? 0 : 2 * plan.teams;
}

/// Returns whether the L2 cache should evict lines of keys and values first once they are read. That is 3 to 7 % faster
/// where a cache is small, and 2 to 4 % slower where it is large.
bool passes_by(const KvcacheProblem& cache, std::int64_t tiles) {
  const Problem& p = cache.problem;
  const std::int64_t row_bytes = std::int64_t{p.heads_k} * (p.head_dim + p.head_dim_v) * bytes_of(cache.stored());
  return tiles <= p.batch && std::int64_t{p.batch} * p.seqlen_k <= h200::kSmallCache / row_bytes;
}

void plan_on_gpu(KvcachePlan& plan, const Problem& like, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  plan.packed_heads = p.group();
  const std::int64_t tiles = counted_tiles(plan);
  const std::int64_t splits = plan_splits(plan, like, tiles, device);
  const std::int64_t expected = plan.splits_apart ? tiles : std::min(tiles, expected_tiles(plan.variant, like));
  plan.teams = static_cast<int>(teams(plan, like, device, expected, splits));
  plan.partials = partials(plan, tiles, splits);
  plan.passes_by = passes_by(plan.cache, expected);
  plan.tiles = p.heads_k * tiles;
  plan.grid = plan.cache.queries() == 0 ? 0 : plan.teams * p.heads_k;
  plan.rotated_at = parts(plan.partials * kvcache_place_bytes(plan.variant) * p.heads_k, 16) * 16;
  plan.workspace_bytes = plan.rotated_at + rotated_bytes(plan.cache);
}

void plan_on_cpu(KvcachePlan& plan, const DeviceInfo& device) {
  share_out(plan, kvcache_cost(plan.cache), device);
  plan.workspace_bytes = cpu::kvcache_workspace_bytes(plan);
}

}  // namespace

std::int64_t rotated_bytes(const KvcacheProblem& cache) {
  const Problem& p = cache.problem;
  return cache.rotary_dim == 0 ? 0 : cache.queries() * p.heads_q * p.head_dim * bytes_of(p.dtype);
}

namespace {

/// Plans the call by a row of the table, which is chosen for a dense problem like that of the plan.
void select_row(KvcachePlan& plan, const Problem& like, const DeviceInfo& device) {
  const KvcacheProblem& cache = plan.cache;
  const bool on_cpu = like.device.type == DeviceType::kCpu;
  // One thread block can compute several splits only where each group of warps has keys of its own; and of such tiles
  // all have the same rows, so that it does not count how many queries come at a time.
  const bool splits = cache.num_splits > 0 || cache.batch_invariant;
  const auto suits = [&](const KvcacheRow& row) {
    const Arch arch = row.variant.arch;
    return arch == Arch::kCpu || (arch == Arch::kSm80 && (!splits || row.variant.tile_m == h200::kFewRows));
  };
  const auto time = [&](const KvcacheRow& row, const Problem& dense) {
    Estimate found = estimate(row, dense, device);
    if (!splits) found.time *= time_of_warps(row.variant, dense, device);  // with splits no row depends on the batch
    return found;
  };
  Problem stored = like;  // the rows on a GPU are of the dtype that they read
  if (!on_cpu) stored.dtype = cache.stored();
  const auto choice = choose(stored, device, kvcache_rows(), suits, time);
  plan.variant = choice.row->variant;
  plan.shared_memory = shared_memory_of(Kind::kKvcache, plan.variant);
  plan.why = choice.why;
  plan.run = choice.row->run;
  on_cpu ? plan_on_cpu(plan, device) : plan_on_gpu(plan, like, device);
}

}  // namespace

KvcachePlan select_few(const KvcacheProblem& cache, int most_queries, const DeviceInfo& device) {
  KvcachePlan plan;
  plan.problem = cache.problem;
  plan.cache = cache;
  plan.most_queries = most_queries;
  Problem like = as_dense(cache);
  like.seqlen_q = 1;
  select_row(plan, like, device);
  return plan;
}

KvcachePlan select_kvcache(const KvcacheProblem& cache, const DeviceInfo& device) {
  const Problem& p = cache.problem;
  KvcachePlan plan;
  plan.problem = p;
  plan.cache = cache;
  if (p.device.type != DeviceType::kCpu) {
    const std::int64_t new_rows = std::int64_t{p.ragged ? 1 : p.batch} * cache.seqlen_new;
    countable("k_new", new_rows + cache.queries(), "rows, with those of q");
    if (cache.batch_invariant ? select_invariant(plan, device) : select_prefill(plan, device)) return plan;
  }
  select_row(plan, as_dense(cache), device);
  return plan;
}

}  // namespace flashtile
