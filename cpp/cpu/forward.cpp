// This file is the forward: it hands the work items of a dense or ragged batch to threads.
#include "attend.h"
#include "cpu.h"
#include "parallel.h"

namespace flashtile::cpu {
namespace {

std::int64_t thread_bytes(const Sizes& sizes, bool dropout) {
  Arena arena;
  take_attend_memory(arena, sizes, dropout);
  return arena.bytes();
}

/// This says where the rows of a work item lie in q, k and v, and its columns in the column mask.
struct Source {
  const Problem& problem;
  const ForwardTensors& t;
  const Item& item;
  PackedHeads heads;
  int head_k;
  std::int64_t* query_starts;

  HeadRows queries(Range rows) const {
    return packed_rows(t.q, item.batch, heads, item.rows.q.first, rows, query_starts);
  }
  KeyRows keys(Range range) const {
    const int first = item.rows.k.first + range.begin;
    return {head_rows(t.k, item.batch, head_k, first), head_rows(t.v, item.batch, head_k, first)};
  }
  const HiddenRows* columns(Range range) const {
    return columns_of(problem, t.mask, item.batch, heads.first, item.rows.k, range.begin);
  }
};

}  // namespace

std::int64_t forward_workspace_bytes(const ForwardPlan& plan) {
  const Problem& problem = plan.problem;
  Arena table;
  table.take<Items::Entry>(Items::table_size(problem));
  const Sizes sizes = tile_sizes(problem, plan.variant, plan.packed_heads);
  return table.bytes() + plan.grid * thread_bytes(sizes, problem.dropout.active());
}

void run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace, Stream) {
  const Problem& problem = plan.problem;
  const int packed = plan.packed_heads;
  const Sizes sizes = tile_sizes(problem, plan.variant, packed);
  const std::int64_t bytes = thread_bytes(sizes, problem.dropout.active());
  Arena table(workspace);
  const Items items(problem, entries_of(problem, &tensors), table.take<Items::Entry>(Items::table_size(problem)),
                    problem.heads_q / packed,
                    [&](const Sequence& rows) { return Spans::tiles(rows.q.size * packed, sizes.tile_m); });
  parallel_for(plan.grid, items.count(), [&](int thread, std::int64_t index) {
    Arena arena(static_cast<std::byte*>(workspace) + table.bytes() + thread * bytes);
    const AttendMemory memory = take_attend_memory(arena, sizes, problem.dropout.active());
    const Item item = items.at(index);
    const PackedHeads heads{packed, item.head * packed};
    attend(problem, tensors, sizes, memory, item, heads,
           Source{problem, tensors, item, heads, heads.first / problem.group(), memory.query_starts});
  });
}

}  // namespace flashtile::cpu
