#include "select/balance.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "flashtile/mask/mask.h"
#include "recent.h"
#include "select/sections.h"

namespace flashtile {
namespace {

constexpr int kSmallestSection = 32;      // in sections of fewer tiles of long heads too few neighbours share keys
constexpr unsigned kLargestCount = 4096;  // the rounds of more tiles are not counted, but taken to be balanced
constexpr int kTileOverhead = 1;          // the cost of a tile beside its key blocks, in key blocks
constexpr double kAsGood = 0.998;         // a section balances as well as the best if its score is this close

/// This constant is fitted to runs on an H200 (docs/performance.md).
namespace h200 {

constexpr double kSpeedUncached = 0.9;  // relative speed of a section whose keys and values leave the L2 cache

}  // namespace h200

/// These constants are fitted to runs on an H100, and held on an H200 (docs/performance.md, smaller sections).
namespace h100 {

constexpr int kShortHead = 16;         // blocks of rows, up to which a head is short
constexpr double kCostOfHead = 0.008;  // share of its speed that a section of short heads loses by each of them

}  // namespace h100

/// A schedule depends on these fields and on nothing else.
struct Key {
  Band band;
  Lengths lengths;
  HeadPacking packing;
  int batch = 0, heads = 0, m_blocks = 0, splits = 0, tile_m = 0, tile_n = 0, blocks = 0;
  double key_bytes = 0;     // of one head, see key_bytes_of_head
  double cached_bytes = 0;  // see there
  bool operator==(const Key&) const = default;
};

/// Returns the cost of a tile of each block of rows, in key blocks; of each split of it, if its keys are split.
std::vector<int> costs(const ForwardPlan& plan) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  std::vector<int> cost(static_cast<std::size_t>(plan.m_blocks * plan.splits), kTileOverhead);
  if (p.band == Band::full()) return cost;  // all tiles cost the same
  for (int m = 0; m < plan.m_blocks; ++m) {
    const Range queries = plan.packing.queries(m * v.tile_m, v.tile_m, p.seqlen_q);
    const BlockWalk walk = p.mask().walk(queries, v.tile_n, p.lengths());
    const int each = (walk.blocks() + plan.splits - 1) / plan.splits;
    for (int split = 0; split < plan.splits; ++split)
      cost[static_cast<std::size_t>(m * plan.splits + split)] += std::clamp(walk.blocks() - split * each, 0, each);
  }
  return cost;
}

double key_bytes_of_head(const ForwardPlan& plan) {
  return key_bytes_of_head(plan, plan.problem.seqlen_k);
}

/// Returns how many short heads make a section: few, but enough of them to balance the work. With few heads thread
/// blocks have long tiles and short ones at any time, so that they load at an even rate, and tiles of a head follow
/// each other so closely that its keys and values are still in the L2 cache. Of a large problem it looks at the first
/// heads.
int few_heads(PersistentScheduler scheduler, std::span<const int> cost) {
  scheduler.batch_heads = std::min(scheduler.batch_heads, static_cast<int>(kLargestCount) / scheduler.m_blocks);
  int chosen = 1;
  double best = 0;
  for (int heads = 1; heads <= scheduler.batch_heads && 1 - h100::kCostOfHead * heads > best; ++heads) {
    scheduler.heads_at_once = heads;
    const double found = divide(scheduler, cost) * (1 - h100::kCostOfHead * heads);
    if (found > best) best = found, chosen = heads;
  }
  return chosen;
}

/// Returns how many long heads make a section: the fewest that balance the work as well as any number does.
int balancing_heads(PersistentScheduler scheduler, std::span<const int> cost, double key_bytes, double cached_bytes) {
  const int all = scheduler.batch_heads, blocks_of_head = scheduler.m_blocks;
  if (scheduler.tiles() > kLargestCount) return std::clamp(4 * scheduler.blocks / blocks_of_head, 1, all);
  std::vector<std::pair<int, double>> found;
  double best = 0;
  for (int heads = 1; heads < 2 * all; heads *= 2) {
    scheduler.heads_at_once = std::min(heads, all);
    if (scheduler.heads_at_once * blocks_of_head < kSmallestSection && heads < all) continue;
    const bool cached = scheduler.heads_at_once * key_bytes <= cached_bytes;
    found.emplace_back(scheduler.heads_at_once, divide(scheduler, cost) * (cached ? 1 : h200::kSpeedUncached));
    best = std::max(best, found.back().second);
  }
  return std::ranges::find_if(found, [&](const auto& f) { return f.second >= kAsGood * best; })->first;
}

PersistentScheduler search(const ForwardPlan& plan, double cached_bytes) {
  const int packs = plan.packing.packs_of(plan.problem.heads_q);
  const int all = plan.tiles == 0 ? 0 : plan.problem.batch * packs;  // without tiles, an int might not hold it
  const std::vector<int> cost = costs(plan);
  const bool equal = plan.problem.band == Band::full();  // then heads need no section: one follows the other
  PersistentScheduler scheduler{
      .heads = packs, .m_blocks = plan.m_blocks * plan.splits, .batch_heads = all, .blocks = plan.grid};
  if (!equal && scheduler.tiles() > static_cast<unsigned>(plan.grid))
    scheduler.heads_at_once = scheduler.m_blocks <= h100::kShortHead
                                  ? few_heads(scheduler, cost)
                                  : balancing_heads(scheduler, cost, key_bytes_of_head(plan), cached_bytes);
  divide(scheduler, cost);
  return scheduler;
}

}  // namespace

double divide(PersistentScheduler& scheduler, std::span<const int> cost) {
  const unsigned tiles = scheduler.tiles();
  const auto blocks = static_cast<unsigned>(scheduler.blocks);
  const int all_rounds = tiles == 0 ? 0 : static_cast<int>((tiles + blocks - 1) / blocks);
  // Rounds alternate in direction, so after an even number of them thread blocks have about equal work.
  scheduler.rounds = std::max(all_rounds - 2, 0) / 2 * 2;
  const auto work = [&](unsigned index) { return cost[static_cast<std::size_t>(scheduler.tile(index).m_block)]; };

  using Busy = std::pair<std::int64_t, int>;  // (work so far, thread block)
  std::priority_queue<Busy, std::vector<Busy>, std::greater<>> least_busy;
  std::int64_t sum = 0, most = 0;
  for (int block = 0; block < scheduler.blocks; ++block) {
    std::int64_t busy = 0;
    if (tiles <= kLargestCount)
      for (int n = 0; n < scheduler.rounds; ++n) busy += work(scheduler.index(n, block));
    least_busy.emplace(busy, block);
    sum += busy;
    most = std::max(most, busy);
  }

  const unsigned first = scheduler.tiles_of_rounds();
  std::vector<std::uint16_t> left(tiles - first);
  for (std::size_t i = 0; i < left.size(); ++i) left[i] = static_cast<std::uint16_t>(i);
  std::ranges::stable_sort(left, std::greater<>{}, [&](std::uint16_t i) { return work(first + i); });
  std::vector<std::vector<std::uint16_t>> dealt(blocks);
  for (const std::uint16_t i : left) {
    auto [busy, block] = least_busy.top();
    least_busy.pop();
    dealt[static_cast<std::size_t>(block)].push_back(i);
    busy += work(first + i);
    least_busy.emplace(busy, block);
    sum += work(first + i);
    most = std::max(most, busy);
  }
  std::uint16_t* place = scheduler.dealt;
  for (unsigned block = 0; block < blocks; ++block) {
    place = std::ranges::copy(dealt[block], place).out;
    scheduler.dealt_from[block + 1] = static_cast<std::uint16_t>(place - scheduler.dealt);
  }
  return most == 0 ? 1 : static_cast<double>(sum) / static_cast<double>(most * scheduler.blocks);
}

std::shared_ptr<const PersistentScheduler> balanced_scheduler(const ForwardPlan& plan, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const Key key{p.band,
                p.lengths(),
                plan.packing,
                p.batch,
                p.heads_q,
                plan.m_blocks,
                plan.splits,
                v.tile_m,
                v.tile_n,
                plan.grid,
                key_bytes_of_head(plan),
                cached_bytes(device)};
  static thread_local Recent<Key, std::shared_ptr<const PersistentScheduler>> recent;
  return recent.get(key,
                    [&] { return std::make_shared<const PersistentScheduler>(search(plan, cached_bytes(device))); });
}

}  // namespace flashtile
