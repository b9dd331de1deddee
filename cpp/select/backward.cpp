// This file makes the plan of a backward: its blocks of keys, how thread blocks take them, and the memory it takes.
#include <algorithm>
#include <cstdint>

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

}  // namespace h200

int key_blocks(const Problem& p, const Variant& v) {
  return std::max((p.seqlen_k + v.tile_n - 1) / v.tile_n, 1);
}

/// Returns how many thread blocks take `tiles` blocks of keys, and tiles of queries where a second pass has those. Two
/// passes, or Hopper's one pass over ragged sequences, take one wave of persistent thread blocks. So does one pass over
/// dense sequences where a block meets so few queries that its prologue and epilogue matter. Under a mask such a wave
/// is made of whole heads, so that rounds in alternate directions give each thread block equal work; it is not taken
/// where it would leave too many multiprocessors idle.
///
/// Where dQ is summed in a fixed order, each thread block takes the next block of keys that nobody has taken, so that a
/// block only ever waits for one that already runs. That pays only in short heads, of which more can share the L2 cache
/// than have to wait for each other.
int thread_blocks(const Problem& p, const Variant& v, const DeviceInfo& device, int tiles) {
  const int wave = device.multiprocessors;
  if (v.two_passes() || (p.ragged && v.one_pass())) return std::min(tiles, wave);
  if (p.ragged) return tiles;
  const std::int64_t queries = std::int64_t{p.group()} * p.seqlen_q;
  if (!v.may_loop() || queries == 0 || queries > h200::kFewQueries) return tiles;
  const int blocks = key_blocks(p, v);
  if (p.deterministic && std::int64_t{blocks} * v.head_dim * v.head_dim > h200::kShortHead) return tiles;
  if (p.deterministic || p.band == Band::full()) return std::min(tiles, wave);
  const int of_whole_heads = wave / blocks * blocks;
  return of_whole_heads < h200::kBusy * wave ? tiles : std::min(tiles, of_whole_heads);
}

void plan_on_cpu(BackwardPlan& plan, const DeviceInfo& device) {
  plan.grid = threads_for(plan.tiles, backward_cost(plan.problem), device);
  plan.workspace_bytes = cpu::backward_workspace_bytes(plan.problem, plan.variant, plan.grid);
}

void plan_on_gpu(BackwardPlan& plan, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const BackwardWorkspace workspace = BackwardWorkspace::of(p, v, plan.parts);
  countable("q", workspace.tiles, kTiles);  // the rows of these tiles still fit in int64
  countable("q", workspace.rows(), "rows (batch × heads × whole blocks)");
  if (v.two_passes()) plan.tiles += workspace.tiles;
  plan.grid = thread_blocks(p, v, device, countable("k", plan.tiles, kTiles));
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
