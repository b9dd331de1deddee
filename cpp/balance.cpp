#include "balance.h"

#include <algorithm>
#include <vector>

#include "flashtile/math/mask.h"
#include "flashtile/scheduler/persistent.h"
#include "recent.h"

namespace flashtile {
namespace {

constexpr int kSmallestSection = 32;       // tiles
constexpr unsigned kLargestSearch = 4096;  // tiles: beyond, any section of a few rounds is even
constexpr int kTileOverhead = 1;           // of a tile, in key blocks
constexpr double kAsGood = 0.995;

struct Key {
  Band band;
  Lengths lengths;
  int batch_heads = 0, heads = 0, tile_m = 0, tile_n = 0, blocks = 0;
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

int search(const Key& key) {
  const int m_blocks = (key.lengths.q + key.tile_m - 1) / key.tile_m;
  PersistentScheduler scheduler{key.heads, m_blocks, key.batch_heads, key.batch_heads};
  if (scheduler.tiles() <= static_cast<unsigned>(key.blocks)) return key.batch_heads;
  if (scheduler.tiles() > kLargestSearch) return std::clamp(4 * key.blocks / m_blocks, 1, key.batch_heads);
  std::vector<int> cost;
  for (int m = 0; m < m_blocks; ++m) {
    const Range rows = {m * key.tile_m, std::min((m + 1) * key.tile_m, key.lengths.q)};
    const Range visible = key.band.tiles(rows, key.tile_n, key.lengths).visible;
    cost.push_back(std::max(visible.end - visible.begin, 0) + kTileOverhead);
  }
  std::vector<std::pair<int, double>> found;
  double best = 0;
  for (int heads = 1; heads < 2 * key.batch_heads; heads *= 2) {
    scheduler.heads_at_once = std::min(heads, key.batch_heads);
    if (scheduler.heads_at_once * m_blocks < kSmallestSection && heads < key.batch_heads) continue;
    found.emplace_back(scheduler.heads_at_once, evenness(scheduler, cost, key.blocks));
    best = std::max(best, found.back().second);
  }
  return std::find_if(found.begin(), found.end(), [&](const auto& f) { return f.second >= kAsGood * best; })->first;
}

}  // namespace

int heads_at_once(const Problem& p, const Variant& v, int blocks) {
  if (p.band == Band::full()) return 1;  // all tiles are equal: head after head
  const Key key{p.band, p.lengths(), p.batch * p.heads_q, p.heads_q, v.tile_m, v.tile_n, blocks};
  static thread_local Recent<Key, int> recent;
  return recent.get(key, [&] { return search(key); });
}

}  // namespace flashtile
