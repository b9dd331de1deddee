// This file makes the plan of a backward: its blocks of keys, how thread blocks take them, and the memory it takes.
#include <algorithm>
#include <limits>

#include "cpu/cpu.h"
#include "flashtile/flashtile.h"
#include "flashtile/mask_words.h"
#include "flashtile/workspace.h"
#include "select/choose.h"
#include "select/key_blocks.h"
#include "select/sections.h"
#include "select/work.h"

namespace flashtile {
namespace {

void plan_on_cpu(BackwardPlan& plan, const DeviceInfo& device) {
  plan.grid = threads_for(plan.tiles, backward_cost(plan.problem), device);
  plan.workspace_bytes = cpu::backward_workspace_bytes(plan.problem, plan.variant, plan.grid);
}

/// This constant and the rule for long sequences are fitted to runs on an H100 (docs/performance.md).
namespace h100 {

// So few tiles of dQ are cleared in less time than blocks of keys take to find out which of them stores first.
constexpr int kFewTiles = 128;

}  // namespace h100

/// Returns BackwardPlan::most_that_store. Where a tile is seen by no more blocks of keys than run at a time, most tiles
/// have their first store at once, as all blocks begin. The first block that comes to a tile later is slower by what
/// it asks and tells the others; these catch up with it, from tile to tile, and then all wait for it and each other.
/// To clear such a tile takes little beside what so many blocks add. What a batch-invariant call does is the same for
/// all sizes, as to add −0 to a 0 leaves 0.
int most_that_store(const Problem& p, const Variant& v, const BackwardWorkspace& workspace, const DeviceInfo& device,
                    bool batch_invariant) {
  if (v.arch != Arch::kSm90 || (workspace.tiles <= h100::kFewTiles && !batch_invariant)) return -1;
  return p.deterministic ? std::numeric_limits<int>::max() : device.multiprocessors;
}

void plan_on_gpu(BackwardPlan& plan, const DeviceInfo& device, bool batch_invariant) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const BackwardWorkspace whole = BackwardWorkspace::of(p, v, 1);
  countable("q", whole.tiles, kTiles);  // the rows of these tiles still fit in int64
  countable("q", whole.rows(), "rows (batch × heads × whole blocks)");
  countable("k", plan.tiles, kTiles);
  const BackwardPlan ordered = as_ordered(plan);
  const KeyBlockOrder order =
      batch_invariant ? order_for_any_batch(ordered, device) : order_key_blocks(ordered, device);
  plan.parts = order.parts;
  plan.heads_at_once = order.heads_at_once;
  plan.tiles *= plan.parts;
  const BackwardWorkspace workspace = BackwardWorkspace::of(p, v, plan.parts);
  if (v.two_passes()) plan.tiles += workspace.tiles;
  const int tiles = countable("k", plan.tiles, kTiles);
  plan.grid = order.persistent == 0 ? tiles : std::min(tiles, order.persistent);
  plan.parts_of_sequence = parts_of_sequence(ordered.problem, v);
  plan.blocks_of_section = blocks_of_section(ordered.problem, v, device);
  plan.workspace_bytes = workspace.bytes();
  plan.most_that_store = most_that_store(p, v, workspace, device, batch_invariant);
  if (p.column_masked()) {
    if (v.arch == Arch::kSm90) plan.grid = std::min(tiles, device.multiprocessors);
    plan.mask_tables_at = (plan.workspace_bytes + 15) / 16 * 16;
    plan.workspace_bytes = plan.mask_tables_at + MaskTables::of_backward(p, v, nullptr).bytes();
  }
}

}  // namespace

BackwardPlan select_backward(const Problem& asked, const DeviceInfo& device, bool batch_invariant) {
  Problem problem = asked;
  problem.deterministic |= batch_invariant;
  // Estimates go by the sizes of the whole call, so a batch-invariant one takes the row that is best for many queries.
  const auto of_many = [](const BackwardRow& row, const Problem&) {
    return Estimate{.time = row.variant.arch == Arch::kSm90 ? 1.0 / row.variant.tile_m : 1.0};
  };
  auto choice = batch_invariant ? choose(problem, device, backward_rows(), kEveryRow, of_many)
                                : choose(problem, device, backward_rows(), kEveryRow);
  if (!problem.column_masked() && has_few_queries(problem, choice.row->variant, device)) {
    const auto on_ampere = [](const auto& row) { return row.variant.arch == Arch::kSm80; };
    choice = choose(problem, device, backward_rows(), on_ampere);
    choice.why = kFewQueries;
  }
  BackwardPlan plan;
  plan.problem = problem;
  plan.variant = choice.row->variant;
  plan.tiles = problem.heads_k * problem.places_k(plan.variant.tile_n);
  plan.shared_memory = shared_memory_of(Kind::kBackward, plan.variant);
  plan.variant.arch == Arch::kCpu ? plan_on_cpu(plan, device) : plan_on_gpu(plan, device, batch_invariant);
  plan.why = choice.why;
  plan.run = choice.row->run;
  return plan;
}

}  // namespace flashtile
