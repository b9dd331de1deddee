#include "select/sections.h"

#include <algorithm>
#include <cstdint>

#include "flashtile/scheduler/ragged.h"

namespace flashtile {
namespace {

/// These constants are fitted to runs on an H200 (docs/performance.md).
namespace h200 {

// Larger sections were slower. Other GPUs go by the same number of bytes, and those with a smaller L2 cache by the same
// share of it.
constexpr double kCachedBytes = 32e6;
constexpr double kCachedShare = 0.61;

// Where thread blocks of a ragged forward take this many tiles each, these balance the work without sections.
constexpr int kManyTiles = 8;
constexpr int kManyBlocks = 16;     // a head of at least this many blocks of keys gains by sections
constexpr int kLongHead = 2048;     // a head is long from here on, in blocks of keys times head dimension;
constexpr int kBlocksTogether = 8;  // then this many of its blocks run at the same time and add to its dQ in order,
constexpr int kOfQueryHead = 4;     // or this many for each query head of a group, as a step is then less of a block
constexpr int kShortWindow = 2;     // a window is short in sequences that are so many times as long

}  // namespace h200

/// Kernels that list tiles add numbers of heads to the size of a section, so this keeps it well below what an int
/// holds.
int few_enough(double blocks_of_section) {
  return static_cast<int>(std::min<double>(blocks_of_section, 1 << 30));
}

/// Returns whether blocks of keys wait for each other to add to dQ.
bool adds_in_order(const Problem& p, const Variant& v) {
  return p.deterministic && v.parts_of_dq() > 0;
}

/// Returns whether most blocks of keys of ragged sequences see equally many queries, as under a window that is short by
/// the mean of their lengths. Hopper's kernel of one pass then takes them as it takes those of dense ones.
bool are_even(const Problem& p, const Variant& v) {
  const std::int64_t window = std::int64_t{p.band.left} + p.band.right;
  return p.ragged && v.one_pass() && !p.column_masked() && h200::kShortWindow * window * p.batch <= p.seqlen_q;
}

/// Returns the size of a section of a backward in blocks of keys, of which each head has `key_blocks`, or 1 where that
/// makes no difference. 0 stands for sections of one head. `several` means the same as in heads_at_once.
///
/// Where blocks add to dQ in order, few of those that run at the same time should belong to one head, as they wait for
/// each other, but some should, as they share its queries in the L2 cache. Otherwise, under a mask, the work of a
/// head's blocks differs; then a section is one wave, so that neighbours have about equal work, and more than a wave
/// where a block goes through a whole group of query heads.
std::int64_t backward_section(const Problem& p, const Variant& v, const DeviceInfo& device, int key_blocks,
                              bool several) {
  const std::int64_t wave = device.multiprocessors;
  if (adds_in_order(p, v)) {
    const std::int64_t length = std::int64_t{key_blocks} * v.head_dim;
    const std::int64_t together = std::max(h200::kBlocksTogether, h200::kOfQueryHead * p.group());
    return wave * std::max<std::int64_t>(h200::kLongHead, length) / (together * v.head_dim);
  }
  return p.band == Band::full() ? 0 : wave * (several ? 1 : p.group());
}

}  // namespace

Problem as_uneven(const Problem& p) {
  Problem uneven = p;
  uneven.batch = (p.batch + 1) / 2;
  return uneven.dense();
}

double cached_bytes(const DeviceInfo& device) {
  return std::min(h200::kCachedBytes, h200::kCachedShare * static_cast<double>(device.l2_bytes));
}

double key_bytes_of_head(const ForwardPlan& plan, int keys) {
  const Problem& p = plan.problem;
  const double per_kv_head = 1.0 * keys * (p.head_dim + p.head_dim_v) * bytes_of(p.dtype);
  return per_kv_head * p.heads_k / plan.packing.packs_of(p.heads_q);
}

double query_bytes_of_head(const Problem& p, const Variant& v) {
  const double of_dq = v.two_passes() ? 0 : 4.0 * v.head_dim;
  return (1.0 * bytes_of(p.dtype) * (p.head_dim + p.head_dim_v) + of_dq) * std::max(p.seqlen_q, 1);
}

int parts_of_sequence(const Problem& p) {
  constexpr int kMost = 1 << 28;
  return p.band == Band::full() || p.batch > kMost ? 1 : RaggedOrder::kMostParts;
}

int parts_of_sequence(const Problem& p, const Variant& v) {
  // Where dQ is summed in a fixed order, the blocks of a head have to be taken in order too. Of two passes, one fills
  // the tail of the other.
  return p.deterministic || v.two_passes() || are_even(p, v) ? 1 : parts_of_sequence(p);
}

int blocks_of_section(const ForwardPlan& plan, const DeviceInfo& device) {
  if (plan.problem.band == Band::full() || plan.tiles / h200::kManyTiles >= plan.grid) return 0;
  return few_enough(cached_bytes(device) / key_bytes_of_head(plan, plan.packing.queries_of(plan.variant.tile_m)));
}

int blocks_of_section(const Problem& p, const Variant& v, const DeviceInfo& device) {
  const int key_blocks = adds_in_order(p, v) ? std::max(Spans::tiles(as_uneven(p).seqlen_k, v.tile_n), 1) : 1;
  return few_enough(static_cast<double>(backward_section(p, v, device, key_blocks, v.one_pass() && !are_even(p, v))));
}

int heads_at_once(const Problem& p, const Variant& v, const DeviceInfo& device, int key_blocks, bool several) {
  // A wider section keeps more of dQ in the L2 cache. Where a head has few blocks this costs more than better balance
  // gains, unless thread blocks take several.
  const bool pays = adds_in_order(p, v) || several || key_blocks >= h200::kManyBlocks;
  const std::int64_t all = std::max<std::int64_t>(std::int64_t{p.batch} * p.heads_k, 1);
  std::int64_t wanted = pays ? backward_section(p, v, device, key_blocks, several) / key_blocks : 1;
  const auto cached = static_cast<std::int64_t>(static_cast<double>(device.l2_bytes) / query_bytes_of_head(p, v));
  const std::int64_t most = std::max<std::int64_t>({cached, device.multiprocessors / key_blocks, 1});
  if (!adds_in_order(p, v)) {  // then sections are equal, as a small last one would balance nothing
    wanted = std::max<std::int64_t>(wanted, 1);
    const std::int64_t of_size = wanted > most ? (2 * all + most) / (2 * most) : (all + wanted - 1) / wanted;
    const std::int64_t sections = std::max<std::int64_t>(of_size, 1);
    wanted = (all + sections - 1) / sections;
  }
  return static_cast<int>(std::clamp<std::int64_t>(wanted, 1, all));
}

}  // namespace flashtile
