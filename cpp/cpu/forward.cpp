// Forward: the items of a dense or ragged batch, handed to threads.
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

/// The rows of an item, side by side in q, k and v.
struct Rows {
  const ForwardTensors& t;
  const Item& item;
  int head_k;

  HeadRows queries(Range range) const { return head_rows(t.q, item.batch, item.head, item.rows.q.first + range.begin); }
  KeyRows keys(Range range) const {
    const int first = item.rows.k.first + range.begin;
    return {head_rows(t.k, item.batch, head_k, first), head_rows(t.v, item.batch, head_k, first)};
  }
};

}  // namespace

std::int64_t forward_workspace_bytes(const Problem& problem, const Variant& variant, int threads) {
  Arena table;
  table.take<Items::Entry>(Items::table_size(problem));
  return table.bytes() + threads * thread_bytes(tile_sizes(problem, variant), problem.dropout.active());
}

void run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace, Stream) {
  const Problem& problem = plan.problem;
  const Sizes sizes = tile_sizes(problem, plan.variant);
  const std::int64_t bytes = thread_bytes(sizes, problem.dropout.active());
  Arena table(workspace);
  const Items items(problem, entries_of(problem, &tensors), table.take<Items::Entry>(Items::table_size(problem)),
                    problem.heads_q, [&](const Sequence& rows) { return Spans::tiles(rows.q.size, sizes.tile_m); });
  parallel_for(plan.grid, items.count(), [&](int thread, std::int64_t index) {
    Arena arena(static_cast<std::byte*>(workspace) + table.bytes() + thread * bytes);
    const AttendMemory memory = take_attend_memory(arena, sizes, problem.dropout.active());
    const Item item = items.at(index);
    attend(problem, tensors, sizes, memory, item, Rows{tensors, item, item.head / problem.group()});
  });
}

}  // namespace flashtile::cpu
