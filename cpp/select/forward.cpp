// This file makes the plan of a forward: its tiles, its grid, and the memory it takes.
#include <algorithm>

#include "cpu/cpu.h"
#include "flashtile/cuda/marked_count.h"
#include "flashtile/error.h"
#include "flashtile/flashtile.h"
#include "flashtile/forward_memory.h"
#include "flashtile/forward_parts.h"
#include "flashtile/mask_words.h"
#include "flashtile/scheduler/ragged.h"
#include "select/balance.h"
#include "select/choose.h"
#include "select/plans.h"
#include "select/sections.h"
#include "select/work.h"

namespace flashtile {
namespace {

void plan_on_cpu(ForwardPlan& plan, const DeviceInfo& device) {
  share_out(plan, forward_cost(plan.problem), device);
  plan.workspace_bytes = cpu::forward_workspace_bytes(plan);
}

/// Plans the scheduler metadata of a ragged batch, which has `places` slots for tiles in one head (see Spans). A kernel
/// that runs before this one lists the tiles by work, longest first. Hopper's thread blocks do without a list where
/// sequences are few and their tiles can be counted in a few bits: then each orders them by itself (see FewSequences).
/// Under a column mask shared memory has no room for that.
void plan_metadata(ForwardPlan& plan, std::int64_t places, const DeviceInfo& device) {
  const bool few = plan.problem.batch <= RaggedOrder::kFewSequences && places <= RaggedOrder::kFewPlaces &&
                   plan.tiles < static_cast<std::int64_t>(MarkedCount::kLimit) && !plan.problem.column_masked();
  const ForwardPlan ordered = as_ordered(plan);
  plan.parts_of_sequence = parts_of_sequence(ordered.problem);
  plan.blocks_of_section = blocks_of_section(ordered, device);
  plan.lists = plan.variant.arch != Arch::kSm90 || !few;
  plan.workspace_bytes = plan.lists ? RaggedTiles::bytes(plan.m_blocks) : sizeof(std::uint64_t);
}

void plan_on_gpu(ForwardPlan& plan, const Estimate& estimate, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const HeadPacking packing = estimate.packing;
  plan.packing = packing;
  plan.splits = estimate.splits;
  plan.packed_heads = packing.heads;
  const int queries = packing.queries_of(v.tile_m);  // queries of a tile
  const std::int64_t places = p.places_q(queries);
  plan.m_blocks = p.ragged ? static_cast<int>(places) : Spans::tiles(p.seqlen_q, queries);
  plan.tiles = packing.packs_of(p.heads_q) * places * plan.splits;
  plan.grid = countable("q", plan.tiles, kTiles);
  plan.shared_memory = forward_shared_memory(v, p.column_masked());
  plan.doubles_warps = v.may_double_warps() && plan.grid <= device.multiprocessors;
  if (v.arch == Arch::kSm90) {
    plan.grid = std::min({plan.grid, device.multiprocessors, PersistentScheduler::kMaxBlocks});
    if (!p.ragged) plan.scheduler = balanced_scheduler(as_ordered(plan), device);
  }
  if (p.ragged) plan_metadata(plan, places, device);
  const auto append = [&](std::int64_t bytes) {
    const std::int64_t at = (plan.workspace_bytes + 15) / 16 * 16;
    plan.workspace_bytes = at + bytes;
    return at;
  };
  if (p.column_masked()) {
    if (!p.ragged && v.arch == Arch::kSm90) {  // tiles are handed out by a MarkedCount
      if (plan.tiles >= static_cast<std::int64_t>(MarkedCount::kLimit))
        throw Unsupported("mask is given with " + std::to_string(plan.tiles) + " " + kTiles + ", expected fewer than " +
                          std::to_string(MarkedCount::kLimit));
      plan.workspace_bytes = sizeof(std::uint64_t);
    }
    plan.mask_tables_at = append(MaskTables::of_forward(p, v, nullptr).bytes());
  }
  if (plan.splits > 1) plan.parts_at = append(ForwardParts::bytes(plan));
}

}  // namespace

ForwardPlan plan_tiles(const Problem& problem, const Variant& v, const Estimate& estimate, const DeviceInfo& device) {
  ForwardPlan plan;
  plan.problem = problem;
  plan.variant = v;
  v.arch == Arch::kCpu ? plan_on_cpu(plan, device) : plan_on_gpu(plan, estimate, device);
  return plan;
}

ForwardPlan select_forward(const Problem& problem, const DeviceInfo& device, bool batch_invariant) {
  if (batch_invariant && has_invariant_kernel(problem, device)) return select_invariant(problem, device);
  const auto choice = choose_forward(problem, device, forward_rows(), kEveryRow);
  ForwardPlan plan = plan_tiles(problem, choice.row->variant, choice.estimate, device);
  plan.why = choice.why;
  plan.run = choice.row->run;
  return plan;
}

}  // namespace flashtile
