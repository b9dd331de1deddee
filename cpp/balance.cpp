#include "balance.h"

#include <algorithm>
#include <vector>

#include "flashtile/math/mask.h"
#include "flashtile/scheduler/persistent.h"
#include "recent.h"

namespace flashtile {
namespace {

constexpr int kSmallestSection = 32;       // tiles
constexpr int kFastestSection = 64;        // tiles, where that is as even as any
constexpr unsigned kLargestSearch = 4096;  // tiles: beyond, any section of a few rounds is even
constexpr int kTileOverhead = 1;           // of a tile, in key blocks
constexpr double kAsGood = 0.995;

struct Key {
  Band band;
  Lengths lengths;
  HeadPacking packing;
  int batch = 0, heads = 0, m_blocks = 0, tile_m = 0, tile_n = 0, blocks = 0;
  bool operator==(const Key&) const = default;
};

/// Work over the time that the busiest thread block takes.
double evenness(const PersistentScheduler& scheduler, const std::vector<int>& cost, int blocks) {
  const auto count = static_cast<unsigned>(blocks);
  std::vector<std::int64_t> busy(count);
  for (unsigned round = 0; round < scheduler.rounds(count); ++round) {
    for (unsigned block = 0; block < count; ++block) {
      const unsigned index = scheduler.index(round, block, count);
      if (index < scheduler.tiles()) busy[block] += cost[static_cast<std::size_t>(scheduler.tile(index).m_block)];
    }
  }
  std::int64_t sum = 0;
  for (const std::int64_t b : busy) sum += b;
  return static_cast<double>(sum) / static_cast<double>(blocks * *std::max_element(busy.begin(), busy.end()));
}

int search(const ForwardPlan& plan) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  PersistentScheduler scheduler = PersistentScheduler::of(plan);
  const int all = scheduler.batch_heads;
  if (scheduler.tiles() <= static_cast<unsigned>(plan.grid)) return all;
  if (scheduler.tiles() > kLargestSearch) return std::clamp(4 * plan.grid / plan.m_blocks, 1, all);
  std::vector<int> cost;
  for (int m = 0; m < plan.m_blocks; ++m) {
    const Range queries = plan.packing.queries(m * v.tile_m, v.tile_m, p.seqlen_q);
    const Range visible = p.band.tiles(queries, v.tile_n, p.lengths()).visible;
    cost.push_back(std::max(visible.end - visible.begin, 0) + kTileOverhead);
  }
  std::vector<std::pair<int, double>> found;
  double best = 0;
  for (int heads = 1; heads < 2 * all; heads *= 2) {
    scheduler.heads_at_once = std::min(heads, all);
    if (scheduler.heads_at_once * plan.m_blocks < kSmallestSection && heads < all) continue;
    found.emplace_back(scheduler.heads_at_once, evenness(scheduler, cost, plan.grid));
    best = std::max(best, found.back().second);
  }
  return std::find_if(found.begin(), found.end(), [&](const auto& f) { return f.second >= kAsGood * best; })->first;
}

}  // namespace

int heads_at_once(const ForwardPlan& plan) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  if (p.band == Band::full()) return 1;  // all tiles are equal: head after head
  const Key key{p.band, p.lengths(), plan.packing, p.batch, p.heads_q, plan.m_blocks, v.tile_m, v.tile_n, plan.grid};
  static thread_local Recent<Key, int> recent;
  return recent.get(key, [&] { return search(plan); });
}

}  // namespace flashtile
