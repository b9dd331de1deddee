#include "select/estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "flashtile/fixed_parts.h"
#include "select/work.h"

namespace flashtile {
namespace {

/// These constants are fitted to runs on an H200 (docs/performance.md). Other GPUs go by them too.
namespace h200 {

// A tile of 192 rows of Hopper's forward is faster in the steady state than one of 128, but has a longer prologue and
// epilogue.
constexpr double kSpeedOf192Rows = 1.06;            // speed per row relative to a tile of 128,
constexpr double kSpeedOf192NarrowRows = 1.24;      // at head dimension 64,
constexpr double kSpeedOf192NarrowRowsBy80 = 1.18;  // there with 80 keys to a tile instead of 128,
constexpr double kSpeedOf192RowsOf80 = 1.17;        // at 80 (an H100, as the next two),
constexpr double kSpeedOf192OddRows = 1.53;  // and at 72, 88, 104 and 120: rows begin within sectors of the L2 cache,
constexpr double kSpeedOf192MaskedRows = 1.02;  // and at 128 under a mask, where a head has several tiles;
constexpr double kSpeedOf128RowsBy80 = 0.86;    // of a tile of 128 by 80 keys, relative to one by 128
constexpr double kEndsOf128Rows = 100;          // a tile's prologue and epilogue, in the time of keys
constexpr double kEndsOf192Rows = 180;
constexpr double kEndsOf192RowsOfFewKeys = 110;  // where all keys are in one block (an H100)

// Where thread blocks share the fixed parts of a tile, each has a prologue and an epilogue that nothing hides. Beside
// these a tile of 64 rows takes this share of the time of one of 128.
constexpr double kPartOf64Rows = 0.85;
constexpr double kEndsOfSharesOf64Rows = 50;
constexpr double kEndsOfSharesOf128Rows = 300;

// In Hopper's backward of one pass this is the time of a query in tiles of 80 queries, relative to tiles of 64.
constexpr double kQueryOf80 = 0.945;

// A tile of 8 or 16 rows over a cache takes as long as its keys take to read. This is the time of a tile of 64, which
// takes longer for its matmuls, relative to that. Where all thread blocks together have little to do, each still takes
// its keys one block after the other, and a part of 64 rows is long to join: that takes the time of so many keys of
// tiles of 16 rows for each key of a sequence, up to a length from which keys are split.
constexpr double kTileOf64Rows = 2.2;
constexpr double kKeysOfLoneTile = 100;
constexpr int kKeysUnsplit = 1500;
constexpr double kMultiprocessors = 132;  // on which that was measured

// Where there are no more tiles over a cache than thread blocks run at a time, several of these may share a tile. These
// times are in nanoseconds.
constexpr double kKeyBlock = 830;        // for a thread block to go through a block of keys more
constexpr double kJoin = 830;            // to join the parts of a tile, beside what follows:
constexpr double kJoinPart = 80;         // each part,
constexpr double kJoinElement = 1.7;     // each element of the tile's rows, for every so many parts,
constexpr int kPartsAtATime = 24;        // which are loaded together,
constexpr double kJoinTiles = 5100;      // and a tile for each multiprocessor, as all join at once
constexpr double kGoingOn = 7000;        // for thread blocks that share all keys evenly to go from one tile to the next
constexpr double kBytesOfMemory = 4000;  // that all thread blocks together read in a nanosecond

// With more tiles than that a thread block takes tiles of up to so many blocks of keys whole, as long as the last round
// of them leaves little idle.
constexpr int kBlocksOfManyTiles = 9;
constexpr double kIdleBlocks = 2.5;  // blocks of keys that each idle thread block might have taken

// A thread block that goes from tile to tile joins the results of its warps at the end of each, which takes long beside
// few keys. These are times relative to a tile that four warps share with other thread blocks: of four warps that take
// it whole, and of one warp, where a multiprocessor has more tiles than thread blocks of four warps at a time, and each
// tile has few bytes: fewer still where there are more tiles than such warps at a time. With many tiles of so few
// elements of queries that parts are short to join, one warp takes no longer where tiles are long, and less where
// sequences are shorter than the cache has room for. That of any other tile by one warp may be so long.
constexpr double kWholeTile = 0.95;
constexpr double kShortTileOfOneWarp = 0.7;
constexpr int kShortTileBytes = 112 << 10, kShortTileOfOneRound = 256 << 10;  // keys and values
constexpr int kTilesOfFourWarps = 2, kManyOfOneWarp = 7;                      // of a multiprocessor
constexpr std::int64_t kFewElements = 128;
constexpr double kLongTileOfOneWarp = 0.93, kTileOfOneWarp = 1.4;

}  // namespace h200

/// These constants are fitted to a few shapes on H100s (docs/performance.md).
namespace h100 {

// These times are in nanoseconds.
constexpr double kLaunch = 3500;  // a kernel behind another
constexpr double kPart = 400;     // to load and join a part more; 300 and 600 were compared (13 calls, an H200)

// As kBlocksOfManyTiles, whatever is left idle.
constexpr int kBlocksOfATile = 3;

// Over a cache a tile of eight warps takes longer than one of four where it has few keys, and a multiprocessor many
// tiles: the time of the former, relative to the latter, at the least.
constexpr double kTileOfEightWarps = 1.05;
constexpr int kShortTile = 1024;  // keys
constexpr int kManyTiles = 4;     // of a multiprocessor

}  // namespace h100

constexpr std::int64_t kRoomForParts = 512 << 20;  // limit in bytes of the results over fixed parts

/// Returns how many keys a tile is multiplied with, on average: those that its queries see, and those that are wasted
/// in the tiles at the mask's edges.
double keys_per_tile(const Variant& v, const Problem& p, HeadPacking packing) {
  const double all = (p.seqlen_k + v.tile_n - 1) / v.tile_n * v.tile_n;
  if (p.band == Band::full() || p.seqlen_q == 0) return all;
  if (p.band.left < p.seqlen_k / 2) {  // a window: blocks begin at the first key that the tile sees
    const int queries = packing.queries_of(v.tile_m), middle = std::max(p.seqlen_q - queries, 0) / 2;
    const int last = std::min(middle + queries, p.seqlen_q) - 1;
    const int begin = p.mask().columns(middle, p.lengths()).begin, end = p.mask().columns(last, p.lengths()).end;
    return (std::max(end - begin, 0) + v.tile_n - 1) / v.tile_n * v.tile_n;
  }
  const double seen = static_cast<double>(p.visible_elements()) / p.seqlen_q;
  return std::min(all, seen + (packing.queries_of(v.tile_m) + v.tile_n) / 2.0);
}

/// Returns the speed of a tile of 192 rows relative to one of 128, row by row. It reads keys from the L2 cache less
/// often, so it gains where these reads are more than the matmuls can hide.
double speed_of_192_rows(const Variant& v, const Problem& p) {
  if (v.head_dim == 64) return v.tile_n == 128 ? h200::kSpeedOf192NarrowRows : h200::kSpeedOf192NarrowRowsBy80;
  if (p.head_dim % 16 != 0) return h200::kSpeedOf192OddRows;
  if (p.head_dim == 128 && p.band != Band::full() && p.seqlen_q > v.tile_m) return h200::kSpeedOf192MaskedRows;
  return v.head_dim == 96 && p.head_dim < 96 ? h200::kSpeedOf192RowsOf80 : h200::kSpeedOf192Rows;
}

/// Returns the speed of a tile of 128 rows relative to the usual one, which has more keys at D128. Only batch-invariant
/// calls have another.
double speed_of_128_rows(const Variant& v) {
  return v.head_dim == 128 && v.tile_n == 80 ? h200::kSpeedOf128RowsBy80 : 1;
}

/// Returns how long `blocks` thread blocks take for so many tiles, of which the shortest and the longest are given, and
/// which take `mean` on average. However they are dealt, a thread block gets n + 1 of the n · blocks + 1 longest tiles.
/// Lengths are taken to fall evenly from the longest to the shortest.
double time_of_rounds(double tiles, int blocks, double shortest, double longest, double mean) {
  constexpr int kMostRounds = 16;  // with more, tiles of different lengths fill the last one
  const double waves = tiles / blocks;
  if (shortest == longest) return std::ceil(waves) * mean;
  double time = std::max(waves * mean, longest);
  for (int n = 1; n < std::min(waves, 1.0 * kMostRounds); ++n)
    time = std::max(time, (n + 1) * (longest - (longest - shortest) * n / waves));
  return time;
}

/// Returns the time of all tiles, each of whose keys are divided among `splits` thread blocks.
double time_of_tiles(const Variant& v, const Problem& p, HeadPacking packing, int splits, const DeviceInfo& device) {
  const bool large = v.tile_m == 192;
  const double speed = large ? speed_of_192_rows(v, p) * 128 / 192 : speed_of_128_rows(v);
  const double ends = !large                   ? h200::kEndsOf128Rows
                      : p.seqlen_k <= v.tile_n ? h200::kEndsOf192RowsOfFewKeys
                                               : h200::kEndsOf192Rows;
  const auto time_of = [&](double keys) { return keys / splits / speed + ends; };
  const std::int64_t tiles_of_pack = Spans::tiles(p.seqlen_q, packing.queries_of(v.tile_m));
  const auto tiles = static_cast<double>(splits * tiles_of_pack * p.batch * packing.packs_of(p.heads_q));
  const double mean = time_of(keys_per_tile(v, p, packing));
  if (p.band == Band::full() || p.seqlen_q == 0) return time_of_rounds(tiles, device.multiprocessors, mean, mean, mean);
  const auto time_of_query = [&](int query) {
    const Range seen = p.mask().columns(query, p.lengths());
    return time_of(std::max(seen.end - seen.begin, 0));
  };
  const int first = std::min(packing.queries_of(v.tile_m), p.seqlen_q) - 1;
  return time_of_rounds(tiles, device.multiprocessors, time_of_query(first), time_of_query(p.seqlen_q - 1), mean);
}

/// Returns the time, in keys of a 128-row tile, of the kernel that joins the results over splits of keys.
double time_of_joining(const Variant& v, const Problem& p, int splits) {
  const double rows = 1.0 * splits * p.seqlen_q * p.batch * p.heads_q;
  const double bytes = 2 * rows * 4 * (p.head_dim_v + 2);  // written, then read
  return (h100::kLaunch + h100::kPart * splits + bytes / counted::kBytes) / counted::time_of_key(v);
}

/// Returns how many keys a tile over a cache sees.
std::int64_t keys_of_tile(const Problem& p) {
  const std::int64_t window = std::int64_t{p.band.left} + p.band.right + p.seqlen_q;
  return p.band.left == Band::kUnbounded ? p.seqlen_k : std::clamp<std::int64_t>(window, 1, std::max(p.seqlen_k, 1));
}

/// Returns how many key blocks so many keys are. The groups of warps of a thread block take one block at a time.
std::int64_t blocks_of(const Variant& v, std::int64_t keys) {
  const std::int64_t block = std::int64_t{groups_of(v)} * v.tile_n;
  return (keys + block - 1) / block;
}

/// Returns how many key blocks such a tile sees, at least one.
std::int64_t blocks_seen(const Variant& v, const Problem& p) {
  return std::max<std::int64_t>(blocks_of(v, keys_of_tile(p)), 1);
}

/// Returns how many bytes of keys and values a tile over a cache sees.
double bytes_of_tile(const Variant& v, const Problem& p) {
  return static_cast<double>(keys_of_tile(p)) * 2 * v.head_dim * bytes_of(v.dtype);
}

/// Returns whether each of so many tiles over a cache sees so few bytes that one warp had best take it, and take it
/// whole.
bool are_short(const Variant& v, const Problem& p, std::int64_t tiles, const DeviceInfo& device) {
  const bool all_at_once = tiles <= blocks_at_a_time(v, device);
  return bytes_of_tile(v, p) <= (all_at_once ? h200::kShortTileOfOneRound : h200::kShortTileBytes);
}

}  // namespace

HeadPacking packing_of_fewest_tiles(const Variant& v, const Problem& p) {
  HeadPacking found;
  if (p.seqlen_q >= 1 << 25 || p.alibi || p.dropout.active() || p.column_masked() || p.fp8) return found;
  const bool mapped = p.score_map().maps();
  std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
  for (const bool share : {false, true}) {
    for (int heads = 1; heads <= std::min(p.group(), HeadPacking::kRows); ++heads) {
      if ((p.group() % heads != 0) != share || (share && mapped)) continue;
      const HeadPacking packing = HeadPacking::of(heads, p.group());
      const std::int64_t tiles =
          std::int64_t{Spans::tiles(p.seqlen_q, packing.queries_of(v.tile_m))} * packing.packs_of(p.group());
      if (tiles < fewest || (tiles == fewest && !share)) fewest = tiles, found = packing;
    }
  }
  return found;
}

Estimate estimate_forward(const Variant& v, const Problem& p, const DeviceInfo& device) {
  if (v.arch != Arch::kSm90) return {};
  const HeadPacking fewest_tiles = packing_of_fewest_tiles(v, p);
  const Estimate plain{time_of_tiles(v, p, {}, 1, device), {}};
  const Estimate packed{time_of_tiles(v, p, fewest_tiles, 1, device), fewest_tiles};
  return packed.time < plain.time ? packed : plain;
}

Estimate estimate_splits(const Variant& v, const Problem& p, const DeviceInfo& device) {
  constexpr int kMostSplits = 32, kFewestBlocks = 2;  // blocks of keys that are worth a thread block
  Estimate best;
  const HeadPacking fewest_tiles = packing_of_fewest_tiles(v, p);
  for (int splits = 2; splits <= std::min(p.seqlen_k / (kFewestBlocks * v.tile_n), kMostSplits); ++splits) {
    for (const HeadPacking packing : {HeadPacking{}, fewest_tiles}) {
      const double time = time_of_tiles(v, p, packing, splits, device) + time_of_joining(v, p, splits);
      if (best.time == 0 || time < best.time) best = {time, packing, splits};
    }
  }
  return best;
}

Estimate estimate_fixed_parts(const Variant& v, const Problem& p, const DeviceInfo& device) {
  const bool few_queries = has_few_queries(v);
  Estimate best = few_queries ? Estimate{} : estimate_forward(v, p, device);
  if (!may_share_tiles(v)) return best;
  const HeadPacking packing = packing_of_fewest_tiles(v, p);
  const int queries = packing.queries_of(v.tile_m), parts = std::max(fixed_parts(v, p.seqlen_k), 1);
  // A window shows so many parts at the most.
  const std::int64_t seen = p.band.left == Band::kUnbounded
                                ? parts
                                : (std::int64_t{p.band.left} + p.band.right + queries) / keys_of_part(v) + 2;
  const std::int64_t tiles = std::int64_t{Spans::tiles(p.seqlen_q, queries)} * p.batch * packing.packs_of(p.heads_q);
  const double of_key = few_queries ? h200::kPartOf64Rows : 1 / speed_of_128_rows(v);
  const double ends = few_queries ? h200::kEndsOfSharesOf64Rows : h200::kEndsOfSharesOf128Rows;
  for (int each = few_queries ? parts : parts - 1; each > 0; --each) {
    const int splits = (parts + each - 1) / each;
    if (splits > 1 && tiles * parts * v.tile_m * 4 * v.head_dim_v > kRoomForParts) break;
    const double waves = std::ceil(1.0 * tiles * std::min<std::int64_t>(splits, seen) / device.multiprocessors);
    const double of_tile = of_key * std::min<std::int64_t>(each, seen) * keys_of_part(v) + ends;
    const double time = waves * of_tile + (splits > 1 ? time_of_joining(v, p, splits) : 0);
    if (best.time == 0 || time < best.time) best = {time, packing, splits};
  }
  return best;
}

/// The kernel of one pass takes as long as the queries that the tiles of a block of keys go through, on average: those
/// that see a key, those that are wasted at the mask's edges, and the padding of the last tile.
Estimate estimate(const BackwardRow& row, const Problem& p) {
  const Variant& v = row.variant;
  if (!v.one_pass() || p.seqlen_k == 0) return {};
  double queries = (p.seqlen_q + v.tile_m - 1) / v.tile_m * v.tile_m;
  if (p.band != Band::full()) {
    const double hidden = p.seqlen_q - static_cast<double>(p.visible_elements()) / p.seqlen_k;
    const double edges = v.tile_n / 2.0 + (v.tile_n % v.tile_m == 0 ? 0 : v.tile_m / 2.0);
    queries -= std::max(hidden - edges, 0.0);
  }
  return {queries * (v.tile_m == 80 ? h200::kQueryOf80 : 1), {}};
}

double time_over_cache(int tile_m, const Problem& p, const DeviceInfo& device) {
  const auto tiles = static_cast<double>(std::max<std::int64_t>((rows_of_sequence(p) + tile_m - 1) / tile_m, 1));
  const double keys = std::max(tiles * p.batch * p.heads_k * p.seqlen_k, 1.0);
  if (tile_m <= 16) return keys;
  const double alone = h200::kKeysOfLoneTile * std::min(p.seqlen_k, h200::kKeysUnsplit);
  return h200::kTileOf64Rows * keys + alone * device.multiprocessors / h200::kMultiprocessors;
}

Estimate estimate(const KvcacheRow& row, const Problem& p, const DeviceInfo& device) {
  if (row.variant.arch == Arch::kCpu) return {};
  return {time_over_cache(row.variant.tile_m, p, device), {}};
}

std::int64_t key_blocks(const Variant& v, const Problem& p) {
  return blocks_of(v, p.seqlen_k);
}

int blocks_at_a_time(const Variant& v, const DeviceInfo& device) {
  constexpr int kOfSystem = 1024;  // the bytes of shared memory that the system reserves for each thread block
  constexpr int kWarps = 8;        // that hide the latency of memory on a multiprocessor
  const int fit = (device.max_shared_memory + kOfSystem) / (kvcache_shared_memory(v) + kOfSystem);
  return device.multiprocessors * std::clamp(fit, 1, std::max(kWarps / v.warps, 2));
}

int blocks_of_tile(const Variant& v, const Problem& p, std::int64_t tiles, const DeviceInfo& device) {
  const std::int64_t blocks = blocks_seen(v, p), most = blocks_at_a_time(v, device);
  const double read = static_cast<double>(tiles) * bytes_of_tile(v, p) / h200::kBytesOfMemory;
  // A thread block waits for its own keys, and all together for memory. Where the two take as long, it takes longer
  // than each: then few of the multiprocessors would have to read all that memory can give.
  const auto time_of = [&](std::int64_t share) {
    return std::hypot(h200::kKeyBlock * static_cast<double>(share - 1), read);
  };
  const std::int64_t elements = std::min<std::int64_t>(rows_of_sequence(p), v.tile_m) * v.head_dim;
  const auto time_of_joining = [&](std::int64_t parts) {
    const auto loads = static_cast<double>(elements * ((parts + h200::kPartsAtATime - 1) / h200::kPartsAtATime));
    return h200::kJoin + h200::kJoinPart * static_cast<double>(parts) + h200::kJoinElement * loads +
           h200::kJoinTiles * static_cast<double>(tiles) / device.multiprocessors;
  };
  int best = 0;
  double least = time_of((tiles * blocks + most - 1) / most) + h200::kGoingOn;
  for (int n = 1; n <= std::min(most / tiles, blocks); ++n) {
    const double time = time_of((blocks + n - 1) / n) + (n > 1 ? time_of_joining(n) : 0);
    if (time < least) best = n, least = time;
  }
  return best;
}

bool takes_whole_tiles(const Variant& v, const Problem& p, std::int64_t tiles, const DeviceInfo& device) {
  if (v.warps == 1) return are_short(v, p, tiles, device);
  if (groups_of(v) == 1 || tiles == 0) return false;
  if (tiles <= blocks_at_a_time(v, device)) return blocks_of_tile(v, p, tiles, device) == 1;
  const std::int64_t blocks = blocks_seen(v, p);
  if (blocks <= h100::kBlocksOfATile || v.fp8()) return blocks <= h100::kBlocksOfATile;
  const double rounds = static_cast<double>(tiles) / blocks_at_a_time(v, device);
  const double idle = (std::ceil(rounds) - rounds) * static_cast<double>(blocks);
  return blocks <= h200::kBlocksOfManyTiles && idle <= h200::kIdleBlocks;
}

double time_of_warps(const Variant& v, const Problem& p, const DeviceInfo& device) {
  const std::int64_t tiles = tiles_of_rows(p, v, p.group()) * p.heads_k;
  const auto has_of_each = [&](std::int64_t number) { return tiles >= number * device.multiprocessors; };
  if (v.warps == 8)
    return has_of_each(h100::kManyTiles) && p.seqlen_k <= h100::kShortTile ? h100::kTileOfEightWarps : 1;
  if (v.warps > 1) return has_of_each(1) && takes_whole_tiles(v, p, tiles, device) ? h200::kWholeTile : 1;
  const bool short_to_join = rows_of_sequence(p) * v.head_dim <= h200::kFewElements;
  if (tiles > h200::kTilesOfFourWarps * device.multiprocessors && are_short(v, p, tiles, device))
    return h200::kShortTileOfOneWarp;
  return has_of_each(h200::kManyOfOneWarp) && short_to_join ? h200::kLongTileOfOneWarp : h200::kTileOfOneWarp;
}

}  // namespace flashtile
