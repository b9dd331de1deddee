// This file makes the plan of a backward: its blocks of keys, how thread blocks take them, and the memory it takes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/cpu.h"
#include "flashtile/flashtile.h"
#include "flashtile/workspace.h"
#include "select/choose.h"
#include "select/sections.h"
#include "select/work.h"

namespace flashtile {
namespace {

/// These constants are fitted to runs on an H200 (docs/performance.md).
namespace h200 {

constexpr int kFewQueries = 4096;             // with no more queries, a block's prologue and epilogue matter
constexpr std::int64_t kShortHead = 1 << 16;  // a head is short up to here, in blocks of keys times head_dim²
constexpr double kBusy = 0.95;                // a grid should use this share of the multiprocessors

// These are counted from the kernels, not yet fitted to runs. Times are in nanoseconds, or in steps (see GroupWalk).
constexpr double kEndsOfBlock = 2;      // prologue and epilogue of a thread block, in steps
constexpr double kEndsOfPart = 2.5;     // and where it has a part of a block of keys, whose gradients are float32
constexpr double kJoin = 4000;          // the kernel that joins the parts, beside what it moves
constexpr double kFewestSteps = 4;      // of the longest part
constexpr std::int64_t kMostWaves = 4;  // of thread blocks with a part, which bounds the workspace

}  // namespace h200

int key_blocks(const Problem& p, const Variant& v) {
  return std::max((p.seqlen_k + v.tile_n - 1) / v.tile_n, 1);
}

/// Returns how many queries a step of a block of keys has: of two passes the one over these has smaller tiles.
int queries_of_step(const Variant& v) {
  return v.two_passes() ? 64 : v.tile_m;
}

/// KeyWork is the work of all blocks of keys, in steps (see GroupWalk).
struct KeyWork {
  std::int64_t blocks = 0;
  double average = 0, longest = 0;  // steps of a block
  int units = 0;                    // a part has as many of these units of a block's steps as any other, or one less
  double waits = 0;                 // steps that the last block of a head is behind the first

  static KeyWork of(const Problem& problem, const Variant& v) {
    constexpr int kSamples = 16;  // blocks that are looked at, since each call makes a plan
    const Problem p = problem.dense();
    const int blocks = key_blocks(p, v);
    KeyWork work{.blocks = std::int64_t{p.batch} * p.heads_k * blocks};
    const int samples = p.band == Band::full() ? 1 : std::min(blocks, kSamples);
    for (int i = 0; i < samples; ++i) {
      const int n = static_cast<int>(std::int64_t{i} * blocks / samples);
      const Range keys = {n * v.tile_n, std::min((n + 1) * v.tile_n, p.seqlen_k)};
      const double steps =
          1.0 * p.group() * p.mask().transposed().walk(keys, queries_of_step(v), p.lengths().transposed()).blocks();
      work.average += steps / samples;
      work.longest = std::max(work.longest, steps);
    }
    const bool in_order = p.deterministic && !v.two_passes();
    work.units = static_cast<int>(std::min<double>(work.longest, std::numeric_limits<int>::max()));
    if (in_order && p.band != Band::full()) work.units = p.group();  // see KeyBlock
    if (in_order) work.waits = blocks;
    return work;
  }

  /// Returns the estimated time of a backward, in nanoseconds, whose blocks of keys have `parts` parts each, while
  /// `at_once` thread blocks run at a time.
  double time(const Variant& v, Band band, int parts, int at_once) const {
    const double thread_blocks = static_cast<double>(blocks * parts);
    const double ends = parts == 1 ? h200::kEndsOfBlock : h200::kEndsOfPart;
    const double share = std::ceil(1.0 * units / parts) / std::max(units, 1);  // of the longest part in its block
    const double of_part = average / parts + ends, longest_part = longest * share + ends + waits;
    double steps = std::ceil(thread_blocks / at_once) * longest_part;
    if (v.two_passes() || band != Band::full()) {
      // A second pass, of three matmuls where the first has four, fills the tail of the first.
      const double of_queries = v.two_passes() ? 0.75 * static_cast<double>(blocks) * average : 0;
      steps = std::max(longest_part, (thread_blocks * of_part + of_queries) / at_once) + of_part / 2;
    }
    const int matmuls = v.two_passes() ? 4 : 5;
    const double columns = v.head_dim + v.head_dim_v;
    const double join =
        h200::kJoin + 2 * 4 * thread_blocks * v.tile_n * columns / counted::kBytes;  // written, then read
    return steps * matmuls * queries_of_step(v) * v.tile_n * columns / counted::kFlops + (parts == 1 ? 0 : join);
  }
};

/// Returns how many thread blocks share the queries of a block of keys: several where blocks of keys are too few for
/// the GPU, or are one round of thread blocks and a little more.
int parts_of_key_block(const BackwardPlan& plan, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const int of_multiprocessor = v.arch == Arch::kSm90 ? 1 : std::max(device.max_shared_memory / plan.shared_memory, 1);
  const int at_once = device.multiprocessors * of_multiprocessor;
  const std::int64_t most = plan.tiles == 0 ? 1 : h200::kMostWaves * at_once / plan.tiles;
  if (most < 2) return 1;
  const KeyWork work = KeyWork::of(p, v);
  int best = 1;
  double least = counted::kClearly * work.time(v, p.band, 1, at_once);
  for (int parts = 2; parts <= std::min<std::int64_t>(most, work.units); ++parts) {
    if (parts * h200::kFewestSteps > work.longest) break;
    const double time = work.time(v, p.band, parts, at_once);
    if (time < least) best = parts, least = time;
  }
  return best;
}

/// Returns how many thread blocks take `tiles` blocks of keys, in `parts` parts each, and tiles of queries where a
/// second pass has those. Two passes, or Hopper's one pass over ragged sequences, take one wave of persistent thread
/// blocks. So does one pass over dense sequences where a block meets so few queries that its prologue and epilogue
/// matter. Under a mask such a wave is made of whole heads, so that rounds in alternate directions give each thread
/// block equal work; it is not taken where it would leave too many multiprocessors idle.
///
/// Where dQ is summed in a fixed order, each thread block takes the next block of keys that nobody has taken, so that a
/// block only ever waits for one that already runs. That pays only in short heads, of which more can share the L2 cache
/// than have to wait for each other.
int thread_blocks(const Problem& p, const Variant& v, const DeviceInfo& device, int tiles, int parts) {
  const int wave = device.multiprocessors;
  if (v.two_passes() || (p.ragged && v.one_pass())) return std::min(tiles, wave);
  if (p.ragged) return tiles;
  const std::int64_t queries = std::int64_t{p.group()} * p.seqlen_q / parts;
  if (!v.may_loop() || queries == 0 || queries > h200::kFewQueries) return tiles;
  const int blocks = key_blocks(p, v);
  if (p.deterministic && std::int64_t{blocks} * v.head_dim * v.head_dim > h200::kShortHead) return tiles;
  if (p.deterministic || p.band == Band::full()) return std::min(tiles, wave);
  const int of_whole_heads = wave / (blocks * parts) * (blocks * parts);
  return of_whole_heads < h200::kBusy * wave ? tiles : std::min(tiles, of_whole_heads);
}

void plan_on_cpu(BackwardPlan& plan, const DeviceInfo& device) {
  plan.grid = threads_for(plan.tiles, backward_cost(plan.problem), device);
  plan.workspace_bytes = cpu::backward_workspace_bytes(plan.problem, plan.variant, plan.grid);
}

void plan_on_gpu(BackwardPlan& plan, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  plan.parts = parts_of_key_block(plan, device);
  plan.tiles *= plan.parts;
  const BackwardWorkspace workspace = BackwardWorkspace::of(p, v, plan.parts);
  countable("q", workspace.tiles, kTiles);  // the rows of these tiles still fit in int64
  countable("q", workspace.rows(), "rows (batch × heads × whole blocks)");
  if (v.two_passes()) plan.tiles += workspace.tiles;
  plan.grid = thread_blocks(p, v, device, countable("k", plan.tiles, kTiles), plan.parts);
  plan.heads_at_once = heads_at_once(p, v, device, key_blocks(p, v), v.may_loop() && plan.grid < plan.tiles);
  // Where dQ is summed in a fixed order, the blocks of a head have to be taken in order too. With two passes, the
  // second one fills the tail of the first.
  plan.parts_of_sequence = p.deterministic || v.two_passes() ? 1 : parts_of_sequence(p);
  plan.blocks_of_section = blocks_of_section(p, v, device);
  plan.workspace_bytes = workspace.bytes();
}

}  // namespace

BackwardPlan select_backward(const Problem& problem, const DeviceInfo& device) {
  const auto choice = choose(problem, device, backward_rows(), kEveryRow);
  BackwardPlan plan;
  plan.problem = problem;
  plan.variant = choice.row->variant;
  plan.tiles = problem.heads_k * problem.places_k(plan.variant.tile_n);
  plan.shared_memory = shared_memory_of(Kind::kBackward, plan.variant);
  plan.variant.arch == Arch::kCpu ? plan_on_cpu(plan, device) : plan_on_gpu(plan, device);
  plan.why = choice.why;
  plan.run = choice.row->run;
  return plan;
}

}  // namespace flashtile
