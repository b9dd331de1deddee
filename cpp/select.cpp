// Which kernel, with which tile, grid and memory: the only place where these are chosen.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "balance.h"
#include "cpu/cpu.h"
#include "flashtile/flashtile.h"
#include "flashtile/marked_count.h"
#include "flashtile/prefill.h"
#include "flashtile/scheduler/ragged.h"
#include "flashtile/workspace.h"

namespace flashtile {
namespace {

constexpr int kOldestComputeCapability = 80;

/// Waking a thread costs about as much as this many FLOPs of its work.
constexpr double kFlopsPerThread = 1 << 20;

constexpr const char* kNarrowest = "the first row of this dtype that is wide enough";
constexpr const char* kSmallerTile = "the first row of this dtype that is wide enough and fits the GPU's shared memory";
constexpr const char* kPrefill = "many rows over a cache, on Hopper: the forward kernel";
constexpr const char* kFastest = "of the rows that are just wide enough, the one with the least estimated time";

[[noreturn, gnu::cold]] void refuse_device(const DeviceInfo& device) {
  const int cc = device.compute_capability;
  throw Unsupported("q is on " + name_of(device.device) + " (" + device.name + ", compute capability " +
                    std::to_string(cc / 10) + "." + std::to_string(cc % 10) +
                    "), expected compute capability 8.0 (Ampere) or newer");
}

/// Says what the rows of `arch` do serve.
template <class Row>
[[noreturn, gnu::cold]] void refuse_problem(const Problem& problem, Arch arch, std::span<const Row> rows) {
  std::string dtypes;
  int widest = 0;
  for (const Row& row : rows) {
    if (row.variant.arch != arch) continue;
    const std::string dtype = name_of(row.variant.dtype);
    if (dtypes.find(dtype) == dtypes.npos) dtypes += (dtypes.empty() ? "" : " or ") + dtype;
    if (row.variant.dtype == problem.dtype) widest = std::max(widest, row.variant.head_dim);
  }
  const std::string place = " on " + name_of(problem.device);
  if (widest == 0)
    throw Unsupported("q has dtype " + std::string(name_of(problem.dtype)) + place + ", expected " + dtypes);
  throw Unsupported("q or v has head dimension " + std::to_string(problem.wider_head_dim()) + place +
                    ", expected at most " + std::to_string(widest) + " (less where shared memory is short)");
}

int shared_memory(const ForwardRow& row) {
  return row.variant.arch == Arch::kCpu ? 0 : forward_shared_memory(row.variant);
}

int shared_memory(const BackwardRow& row) {
  return row.variant.arch == Arch::kCpu ? 0 : backward_shared_memory(row.variant);
}

int shared_memory(const KvcacheRow& row) {
  if (row.variant.arch == Arch::kSm90) return forward_shared_memory(row.variant);
  return row.variant.arch == Arch::kCpu ? 0 : kvcache_shared_memory(row.variant);
}

/// Keys that a tile is multiplied with, on average: those that its queries see, and what its edges waste.
double keys_per_tile(const Variant& v, const Problem& p, HeadPacking packing) {
  const double all = (p.seqlen_k + v.tile_n - 1) / v.tile_n * v.tile_n;
  if (p.band == Band::full() || p.seqlen_q == 0) return all;
  const double seen = static_cast<double>(p.visible_elements()) / p.seqlen_q;
  return std::min(all, seen + (packing.query(v.tile_m) + v.tile_n) / 2.0);
}

struct Estimate {
  double time = 0;
  HeadPacking packing;
};

/// Estimated time of one head, in keys of a 128-row tile in the steady state. The constants are fitted to runs on an
/// H200 (docs/performance.md): a larger tile is faster in the long run, but begins and ends slower.
double estimated_time(const Variant& v, const Problem& p, HeadPacking packing) {
  const bool large = v.tile_m == 192;
  const double speed = large ? (v.head_dim == 64 ? 1.24 : 1.06) * 128 / 192 : 1;
  const double overhead = large ? 180 : 100;
  const int tiles = (packing.rows(p.seqlen_q) + v.tile_m - 1) / v.tile_m;
  return tiles * (keys_per_tile(v, p, packing) / speed + overhead) / packing.heads();
}

/// As many heads of a group as one warp's rows take side by side; none for lengths whose rows int cannot count, nor
/// where heads have slopes, of which the kernel takes that of a tile, nor with dropout, whose random words go by rows
/// of one head.
HeadPacking widest_packing(const Problem& p) {
  if (p.seqlen_q >= 1 << 25 || p.alibi || p.dropout.active()) return {};
  return {std::min(std::countr_zero(static_cast<unsigned>(p.group())), 4)};
}

Estimate estimate(const ForwardRow& row, const Problem& p) {
  const Variant& v = row.variant;
  if (v.arch != Arch::kSm90) return {};
  const Estimate plain{estimated_time(v, p, {}), {}};
  const Estimate packed{estimated_time(v, p, widest_packing(p)), widest_packing(p)};
  return packed.time < plain.time ? packed : plain;
}

/// Estimated time of one block of keys in Hopper's kernel of one pass: the queries that its tiles go through, on
/// average, those that see a key, what the edges waste, and what fills up the last tile. The constant is fitted to runs
/// on an H200: of 80 rows at a time, each takes less.
Estimate estimate(const BackwardRow& row, const Problem& p) {
  const Variant& v = row.variant;
  if (v.arch != Arch::kSm90 || v.two_passes() || p.seqlen_k == 0) return {};
  double queries = (p.seqlen_q + v.tile_m - 1) / v.tile_m * v.tile_m;
  if (p.band != Band::full()) {
    const double hidden = p.seqlen_q - static_cast<double>(p.visible_elements()) / p.seqlen_k;
    const double edges = v.tile_n / 2.0 + (v.tile_n % v.tile_m == 0 ? 0 : v.tile_m / 2.0);
    queries -= std::max(hidden - edges, 0.0);
  }
  return {queries * (v.tile_m == 80 ? 0.945 : 1), {}};
}

/// Rows of a sequence over a cache: all heads of a group stand side by side.
std::int64_t rows_of_sequence(const Problem& p) {
  return std::int64_t{p.seqlen_q} * p.group();
}

/// Estimated time of one KV head's tiles, in tiles of 16 rows, which take as long as their keys take to read. Of 64
/// rows each takes longer, of matmuls (docs/performance.md).
Estimate estimate(const KvcacheRow& row, const Problem& p) {
  const Variant& v = row.variant;
  if (v.arch == Arch::kCpu) return {};
  const auto tiles = static_cast<double>(std::max<std::int64_t>((rows_of_sequence(p) + v.tile_m - 1) / v.tile_m, 1));
  return {tiles * (v.tile_m == 16 ? 1 : 2.2), {}};
}

/// Estimated time of a forward kernel that goes over a cache: tiles are few, and about equal where a chunk is short, so
/// that a last round of them counts in which not every multiprocessor has one.
Estimate estimate_prefill(const Variant& v, const Problem& p, const DeviceInfo& device) {
  Estimate found = estimate(ForwardRow{v, nullptr}, p);
  if (p.band != Band::full() && std::int64_t{4} * p.seqlen_q > p.seqlen_k) return found;
  const std::int64_t tiles = (found.packing.rows(p.seqlen_q) + v.tile_m - 1) / v.tile_m;
  const auto all = static_cast<double>(tiles * p.batch * (p.heads_q / found.packing.heads()));
  const double rounds = all / device.multiprocessors;
  if (rounds > 0) found.time *= std::ceil(rounds) / rounds;
  return found;
}

template <class Row>
struct Choice {
  const Row* row = nullptr;
  Estimate estimate;
  const char* why = "";
};

constexpr Features when(bool asked, Features feature) {
  return asked ? feature : Features::kNone;
}

/// What a problem asks of a row of a table that not every row of that table knows on its architecture.
///
/// On Hopper a softcap is unusual, and left to Ampere's rows, if it is large. There a backward finds the slope of a cap
/// by the score, which has to be the tanh itself, of a row that is not steep, as none is by a usual cap.
Features features_of(const Problem& p, Kind kind, const Variant& v) {
  const bool forward = kind == Kind::kForward, backward = kind == Kind::kBackward, cache = kind == Kind::kKvcache;
  const bool on_ampere = v.arch == Arch::kSm80, on_hopper = v.arch == Arch::kSm90;
  const ScoreMap map = p.score_map();
  const bool unusual = map.capped && (p.softcap > kUsualSoftcap || (backward && map.stretched));
  return when(p.dropout.active() && !cache, Features::kDropout) |
         when(p.sinks && (forward || (cache && on_hopper)), Features::kSinks) |
         when(p.deterministic && backward && on_ampere, Features::kOrderedDq) |
         when(p.softcap > 0 && backward && v.one_pass(), Features::kSoftcap) |
         when(unusual && on_hopper, Features::kUnusualSoftcap);
}

template <class Row>
bool serves(const Row& row, const Problem& p) {
  const Variant& v = row.variant;
  return v.head_dim >= p.head_dim && v.head_dim_v >= p.head_dim_v && v.knows(features_of(p, Row::kKind, v));
}

/// Hopper has kernels of its own, for head dimensions up to the widest of `rows`; every newer GPU runs Ampere's.
template <class Row, class Suits>
Arch gpu_arch(std::span<const Row> rows, const DeviceInfo& device, const Problem& problem, const Suits& suits) {
  const auto on_hopper = [&](const Row& row) {
    return row.variant.arch == Arch::kSm90 && serves(row, problem) && suits(row);
  };
  return device.compute_capability == 90 && std::ranges::any_of(rows, on_hopper) ? Arch::kSm90 : Arch::kSm80;
}

/// Of the rows that `suits` lets pass, the one that takes the least time by `estimate_of(row, problem)`.
template <class Row, class Suits, class EstimateOf>
Choice<Row> choose(const Problem& problem, const DeviceInfo& device, std::span<const Row> rows, const Suits& suits,
                   const EstimateOf& estimate_of) {
  const Problem estimated = problem.dense();
  const bool on_cpu = problem.device.type == DeviceType::kCpu;
  if (!on_cpu && device.compute_capability < kOldestComputeCapability) refuse_device(device);
  const Arch arch = on_cpu ? Arch::kCpu : gpu_arch(rows, device, problem, suits);
  Choice<Row> best{.why = kNarrowest};
  for (const Row& row : rows) {
    const Variant& v = row.variant;
    if (v.arch != arch || v.dtype != problem.dtype || !serves(row, problem) || !suits(row)) continue;
    if (best.row && (v.head_dim != best.row->variant.head_dim || v.head_dim_v != best.row->variant.head_dim_v)) break;
    if (shared_memory(row) > device.max_shared_memory) {
      best.why = kSmallerTile;
      continue;
    }
    const Estimate here = estimate_of(row, estimated);
    if (best.row && here.time == 0) break;  // nothing to compare: the first that fits
    if (best.row) best.why = kFastest;
    if (!best.row || here.time < best.estimate.time) best.row = &row, best.estimate = here;
  }
  if (best.row) return best;
  refuse_problem(problem, arch, rows);
}

template <class Row, class Suits = bool (*)(const Row&)>
Choice<Row> choose(
    const Problem& problem, const DeviceInfo& device, std::span<const Row> rows,
    const Suits& suits = [](const Row&) { return true; }) {
  return choose(problem, device, rows, suits, [](const Row& row, const Problem& p) { return estimate(row, p); });
}

/// CPU threads for `tiles` work items.
int threads_for(std::int64_t tiles, Cost cost, const DeviceInfo& device) {
  const double useful = std::min(static_cast<double>(tiles), cost.flops / kFlopsPerThread);
  return static_cast<int>(std::clamp<double>(useful, 1, device.threads));
}

/// `count`, if a GPU can count so far: its thread blocks, and the rows that TMA is asked for.
int countable(const char* tensor, std::int64_t count, const char* of_what) {
  if (count > std::numeric_limits<int>::max())
    throw Unsupported(std::string(tensor) + " has " + std::to_string(count) + " " + of_what +
                      ", expected fewer than 2^31");
  return static_cast<int>(count);
}

int key_blocks(const Problem& p, const Variant& v) {
  return std::max((p.seqlen_k + v.tile_n - 1) / v.tile_n, 1);
}

/// Thread blocks for `tiles` blocks of keys, and tiles of queries if those have a pass of their own. Two passes, or one
/// over ragged sequences, take as many as run at a time. Otherwise a block's beginning and its end weigh where it meets
/// few queries: then as many as run at a time, each for one block after the other; under a mask those of whole heads,
/// so that rounds in alternate directions give each as much to do; not where that leaves too many multiprocessors idle.
///
/// Where sums are in order, each takes the next that nobody has taken, so that whoever waits, waits for one that runs;
/// only in short heads, of which more can share the L2 cache than have to wait for each other (docs/performance.md).
int thread_blocks(const Problem& p, const Variant& v, const DeviceInfo& device, int tiles) {
  constexpr int kFewQueries = 4096;
  constexpr std::int64_t kShortHead = 1 << 16;  // in blocks · head_dim²
  constexpr double kBusy = 0.95;                // of the multiprocessors, at the least
  if (v.two_passes() || (p.ragged && v.one_pass())) return std::min(tiles, device.multiprocessors);
  if (p.ragged) return tiles;
  const std::int64_t queries = std::int64_t{p.group()} * p.seqlen_q;
  if (!v.may_loop() || queries == 0 || queries > kFewQueries) return tiles;
  const int at_a_time = device.multiprocessors;
  if (p.deterministic && std::int64_t{key_blocks(p, v)} * v.head_dim * v.head_dim > kShortHead) return tiles;
  if (p.deterministic || p.band == Band::full()) return std::min(tiles, at_a_time);
  const int of_whole_heads = at_a_time / key_blocks(p, v) * key_blocks(p, v);
  return of_whole_heads < kBusy * at_a_time ? tiles : std::min(tiles, of_whole_heads);
}

constexpr int kLongHead = 2048;  // in blocks · head_dim

/// KV heads whose key blocks take turns. Under a mask the work of a head's blocks differs: then as many heads as one
/// wave of thread blocks holds, so that neighbours have about as much to do, and more where a block has a whole group
/// of query heads to go through. Not where a head has few blocks: more heads at a time take more of the L2 cache for
/// dQ; but if thread blocks take several, evenness is worth more. Where blocks add to dQ in order, so many heads that
/// few of the blocks that run at a time belong to one and wait for each other, but yet some, which share its queries in
/// the L2 cache: eight, and fewer where heads are short.
int heads_at_once(const Problem& p, const Variant& v, const DeviceInfo& device, bool several) {
  constexpr int kManyBlocks = 16;
  const std::int64_t at_a_time = device.multiprocessors;
  const int n_blocks = key_blocks(p, v);
  const std::int64_t length = std::int64_t{n_blocks} * v.head_dim;
  std::int64_t wanted = 1;
  if (p.deterministic && v.parts_of_dq() > 0)
    wanted = at_a_time * std::max<std::int64_t>(kLongHead, length) / (8 * length);
  else if (p.band != Band::full() && (several || n_blocks >= kManyBlocks))
    wanted = at_a_time * (several ? 1 : p.group()) / n_blocks;
  const std::int64_t all = std::int64_t{p.batch} * p.heads_k;
  return static_cast<int>(std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(all, 1)));
}

/// In how many parts a ragged sequence is listed: under a mask, where the work of its blocks differs, until the last is
/// a twelfth. The kernel that lists them counts parts by int.
int parts_of_sequence(const Problem& p) {
  constexpr int kMost = 1 << 28;
  return p.band == Band::full() || p.batch > kMost ? 1 : RaggedOrder::kMostParts;
}

/// Of a ragged backward: as heads_at_once says of a dense one.
int blocks_of_section(const Problem& p, const Variant& v, const DeviceInfo& device) {
  const int at_a_time = device.multiprocessors;
  if (p.deterministic && v.parts_of_dq() > 0) return at_a_time * std::max(kLongHead / v.head_dim, 1) / 8;
  if (p.band == Band::full()) return 0;
  return few_enough(1.0 * at_a_time * (v.one_pass() ? 1 : p.group()));
}

/// Tiles of rows of all sequences, at the most, where `heads` heads stand side by side.
std::int64_t tiles_of_rows(const Problem& p, const Variant& v, int heads) {
  const std::int64_t rows = std::int64_t{p.seqlen_q} * heads;
  if (p.ragged) return rows / v.tile_m + std::max(p.batch, 1);
  return p.batch * ((rows + v.tile_m - 1) / v.tile_m);
}

/// Work items and threads of a CPU. Heads of a group are packed, since keys are read once for all that are, but not so
/// many that threads are left without an item; none for lengths whose rows int cannot count, nor where heads have
/// slopes or dropout, which the kernels take for a tile.
void share_out(Plan& plan, const Cost& cost, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  const auto items = [&](int heads) { return p.heads_q / heads * tiles_of_rows(p, plan.variant, heads); };
  const int threads = threads_for(items(1), cost, device);
  const bool packs = !p.alibi && !p.dropout.active() && std::int64_t{p.seqlen_q} * p.group() < Band::kUnbounded;
  plan.packed_heads = packs ? std::max(p.group(), 1) : 1;  // q may have no head
  while (p.group() % plan.packed_heads != 0 || (plan.packed_heads > 1 && items(plan.packed_heads) < threads))
    --plan.packed_heads;
  plan.tiles = items(plan.packed_heads);
  plan.grid = threads_for(plan.tiles, cost, device);
}

void select_on_cpu(KvcachePlan& plan, const DeviceInfo& device) {
  share_out(plan, kvcache_cost(plan.cache), device);
  plan.workspace_bytes = cpu::kvcache_workspace_bytes(plan);
}

std::int64_t rotated_bytes(const KvcacheProblem& cache) {
  const Problem& p = cache.problem;
  return cache.rotary_dim == 0 ? 0 : cache.queries() * p.heads_q * p.head_dim * bytes_of(p.dtype);
}

/// Thread blocks for as many teams as fit on the GPU at a time; fewer where each would have too little to do.
void select_on_gpu(KvcachePlan& plan, const DeviceInfo& device) {
  constexpr int kKeysOfSplit = 1024;                      // of a batch-invariant call
  constexpr std::int64_t kRoomForSplits = 256 << 20;      // bytes of results of splits that lie apart, at the most
  constexpr std::int64_t kSmallCache = 200 << 20;         // bytes
  constexpr int kRowsOfFewTiles = 16, kFewestKeys = 512;  // of larger tiles a team has so many keys at the least
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const auto parts = [](std::int64_t keys, std::int64_t of) { return (keys + of - 1) / of; };
  const int keys_of_item = groups_of(v) * v.tile_n;
  plan.packed_heads = p.group();
  const std::int64_t tiles = countable("q", tiles_of_rows(p, v, plan.packed_heads), "tiles of rows");
  const std::int64_t items = tiles * std::max<std::int64_t>(parts(p.seqlen_k, keys_of_item), 1);
  countable("q", items, "items (tiles of rows × blocks of keys)");
  countable("q", parts(rows_of_sequence(p), v.tile_m) * v.tile_m, "rows (queries × heads of a group, in whole tiles)");
  const std::int64_t place_bytes = kvcache_place_bytes(v) * p.heads_k;

  plan.num_splits = static_cast<int>(std::min(std::int64_t{plan.cache.num_splits}, parts(p.seqlen_k, keys_of_item)));
  plan.keys_of_split = plan.cache.batch_invariant ? kKeysOfSplit : 0;
  const std::int64_t splits = plan.num_splits > 0          ? plan.num_splits
                              : plan.cache.batch_invariant ? parts(p.seqlen_k, kKeysOfSplit)
                                                           : 0;
  plan.splits_apart = splits > 1 && tiles * splits <= kRoomForSplits / place_bytes;

  // One or two thread blocks at a time on a multiprocessor, each of which takes 1024 bytes for the system too.
  const int at_a_time =
      device.multiprocessors * std::clamp((device.max_shared_memory + 1024) / (plan.shared_memory + 1024), 1, 2);
  const std::int64_t shares = plan.splits_apart ? tiles * splits
                              : splits > 0      ? tiles
                              : v.tile_m <= kRowsOfFewTiles
                                  ? items
                                  : tiles * std::max<std::int64_t>(parts(p.seqlen_k, kFewestKeys), 1);
  plan.teams =
      static_cast<int>(std::clamp<std::int64_t>(std::min<std::int64_t>(at_a_time / p.heads_k, shares), 1, at_a_time));
  plan.partials = plan.splits_apart ? static_cast<int>(tiles * splits)
                  : splits == 1     ? 0
                                    : 2 * plan.teams;  // what each begins with and ends with; or two sums so far
  // 3 to 7 % faster where a cache is small, 2 to 4 % slower where it is large (docs/performance.md).
  const std::int64_t row_bytes = std::int64_t{p.heads_k} * (p.head_dim + p.head_dim_v) * bytes_of(p.dtype);
  plan.passes_by = tiles <= p.batch && std::int64_t{p.batch} * p.seqlen_k <= kSmallCache / row_bytes;
  plan.tiles = p.heads_k * tiles;
  plan.grid = plan.cache.queries() == 0 ? 0 : plan.teams * p.heads_k;
  plan.rotated_at = parts(plan.partials * place_bytes, 16) * 16;
  plan.workspace_bytes = plan.rotated_at + rotated_bytes(plan.cache);
}

constexpr const char* kTiles = "tiles (batch × heads × blocks of rows)";

ForwardPlan plan_tiles(const Problem& problem, const Variant& v, HeadPacking packing, const DeviceInfo& device) {
  ForwardPlan plan;
  plan.problem = problem;
  plan.variant = v;
  if (v.arch == Arch::kCpu) {
    share_out(plan, forward_cost(problem), device);
    plan.workspace_bytes = cpu::forward_workspace_bytes(plan);
    return plan;
  }
  plan.packing = packing;
  plan.packed_heads = packing.heads();
  const int queries = packing.query(v.tile_m);  // of a tile
  const std::int64_t places = problem.places_q(queries);
  plan.m_blocks = problem.ragged ? static_cast<int>(places) : Spans::tiles(problem.seqlen_q, queries);
  plan.tiles = problem.heads_q / packing.heads() * places;
  plan.grid = countable("q", plan.tiles, kTiles);
  plan.shared_memory = forward_shared_memory(v);
  if (v.arch == Arch::kSm90) {
    plan.grid = std::min({plan.grid, device.multiprocessors, PersistentScheduler::kMaxBlocks});
    if (!problem.ragged) plan.scheduler = balanced_scheduler(plan);
  }
  if (problem.ragged) {
    plan.parts_of_sequence = parts_of_sequence(problem);
    plan.blocks_of_section = blocks_of_section(plan);
    plan.lists = v.arch != Arch::kSm90 || problem.batch > RaggedOrder::kFewSequences ||
                 places > RaggedOrder::kFewPlaces || plan.tiles >= static_cast<std::int64_t>(MarkedCount::kLimit);
    plan.workspace_bytes = plan.lists ? RaggedTiles::bytes(plan.m_blocks) : sizeof(std::uint64_t);
  }
  return plan;
}

/// Many rows over a cache, on Hopper: whether the forward kernel goes over it, as it does if its tiles keep at least
/// half of the GPU busy; it does not divide keys, as the kernels over a cache do.
bool select_prefill(KvcachePlan& plan, const DeviceInfo& device) {
  constexpr int kFewestRows = 128, kFewestRowsOfBox = 16;
  const KvcacheProblem& cache = plan.cache;
  const Problem& p = plan.problem;
  const std::int64_t keys = std::int64_t{p.batch} * p.seqlen_k;
  if (device.compute_capability != 90 || !cache.in_line || cache.num_splits > 0 || cache.batch_invariant) return false;
  if (keys == 0 || std::max({keys, std::int64_t{cache.pages} * cache.page_size, cache.queries()}) >= Band::kUnbounded ||
      rows_of_sequence(p.dense()) < kFewestRows)
    return false;
  Problem sequences = p;
  sequences.ragged = true;
  sequences.seqlen_q = static_cast<int>(cache.queries());
  sequences.seqlen_k = static_cast<int>(keys);
  const auto takes = [&](const auto& row, const Problem& of) { return estimate_prefill(row.variant, of, device); };
  ForwardPlan forward;
  if (cache.has_table) {
    const auto suits = [&](const KvcacheRow& row) {
      return row.variant.arch == Arch::kSm90 && rows_of_box(cache, row.variant) >= kFewestRowsOfBox;
    };
    if (gpu_arch(kvcache_rows(), device, p, suits) != Arch::kSm90) return false;
    const auto choice = choose(sequences, device, kvcache_rows(), suits, takes);
    forward = plan_tiles(sequences, choice.row->variant, choice.estimate.packing, device);
    plan.run = choice.row->run;
  } else {
    const auto suits = [](const ForwardRow&) { return true; };
    const auto choice = choose(sequences, device, forward_rows(), suits, takes);
    if (choice.row->variant.arch != Arch::kSm90) return false;
    forward = plan_tiles(sequences, choice.row->variant, choice.estimate.packing, device);
    forward.run = choice.row->run;
    plan.run = prefill_kernel();
  }
  if (2 * forward.tiles < device.multiprocessors) return false;
  plan.variant = forward.variant;
  plan.packed_heads = forward.packed_heads;
  plan.tiles = forward.tiles;
  plan.grid = forward.grid;
  plan.shared_memory = forward.shared_memory;
  plan.prefill_at = rotated_bytes(cache);
  plan.workspace_bytes = PrefillWorkspace::of(plan.prefill_at, p, forward).bytes;
  plan.why = kPrefill;
  plan.prefill = std::make_shared<const ForwardPlan>(std::move(forward));
  return true;
}

}  // namespace

ForwardPlan select_forward(const Problem& problem, const DeviceInfo& device) {
  const auto choice = choose(problem, device, forward_rows());
  ForwardPlan plan = plan_tiles(problem, choice.row->variant, choice.estimate.packing, device);
  plan.why = choice.why;
  plan.run = choice.row->run;
  return plan;
}

BackwardPlan select_backward(const Problem& problem, const DeviceInfo& device) {
  const auto choice = choose(problem, device, backward_rows());
  const BackwardRow& row = *choice.row;
  const Variant& v = row.variant;
  BackwardPlan plan;
  plan.problem = problem;
  plan.variant = v;
  plan.tiles = problem.heads_k * problem.places_k(v.tile_n);
  plan.shared_memory = shared_memory(row);
  if (v.arch == Arch::kCpu) {
    plan.grid = threads_for(plan.tiles, backward_cost(problem), device);
    plan.workspace_bytes = cpu::backward_workspace_bytes(problem, v, plan.grid);
  } else {
    const BackwardWorkspace workspace = BackwardWorkspace::of(problem, v);
    countable("q", workspace.tiles, kTiles);  // of which int64 counts the rows
    countable("q", workspace.rows(), "rows (batch × heads × whole blocks)");
    if (v.two_passes()) plan.tiles += workspace.tiles;
    plan.grid = thread_blocks(problem, v, device, countable("k", plan.tiles, kTiles));
    plan.heads_at_once = heads_at_once(problem, v, device, v.may_loop() && plan.grid < plan.tiles);
    // Where sums are in order, so are the blocks of a head. Of two passes the second fills the end of the first.
    plan.parts_of_sequence = problem.deterministic || v.two_passes() ? 1 : parts_of_sequence(problem);
    plan.blocks_of_section = blocks_of_section(problem, v, device);
    plan.workspace_bytes = workspace.bytes();
  }
  plan.why = choice.why;
  plan.run = row.run;
  return plan;
}

KvcachePlan select_kvcache(const KvcacheProblem& problem, const DeviceInfo& device) {
  KvcachePlan plan;
  plan.problem = problem.problem;
  plan.cache = problem;
  const bool on_cpu = problem.problem.device.type == DeviceType::kCpu;
  if (!on_cpu) {
    const std::int64_t new_rows = std::int64_t{problem.problem.ragged ? 1 : problem.problem.batch} * problem.seqlen_new;
    countable("k_new", new_rows + problem.queries(), "rows, with those of q");
    if (select_prefill(plan, device)) return plan;
  }
  // Only where warps go through keys of their own can one block have several splits.
  const bool splits = problem.num_splits > 0 || problem.batch_invariant;
  const auto suits = [&](const KvcacheRow& row) {
    const Arch arch = row.variant.arch;
    return arch == Arch::kCpu || (arch == Arch::kSm80 && (!splits || groups_of(row.variant) > 1));
  };
  const auto choice = choose(problem.problem, device, kvcache_rows(), suits);
  plan.variant = choice.row->variant;
  plan.shared_memory = shared_memory(*choice.row);
  plan.why = choice.why;
  plan.run = choice.row->run;
  on_cpu ? select_on_cpu(plan, device) : select_on_gpu(plan, device);
  return plan;
}

}  // namespace flashtile
