#include "select/key_blocks.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "flashtile/backward_order.h"
#include "flashtile/mask/mask.h"
#include "flashtile/scheduler/sections.h"
#include "recent.h"
#include "select/estimate.h"
#include "select/sections.h"

namespace flashtile {
namespace {

/// These constants are fitted to runs on an H200 (docs/performance.md).
namespace h200 {

constexpr int kFewQueries = 4096;             // with no more queries, a block's prologue and epilogue matter,
constexpr double kFullRounds = 0.97;          // and where rounds of blocks are as full as this (an H100)
constexpr std::int64_t kShortHead = 1 << 16;  // a head is short up to here, in blocks of keys times head_dim²
constexpr double kBusy = 0.95;                // a grid should use this share of the multiprocessors
constexpr int kHeadsOfPart = 4;               // the fewest query heads of a part, of whatever batch
constexpr double kJoinOfOnePass = 3500;       // as h100::kJoin and kFewestSteps, of one pass, whose kernels start early
constexpr double kFewestStepsOfOnePass = 2;

// These compare with Ampere's kernel (27 shapes of D64 and D256; not measured at D192, nor on an H100).
constexpr int kNarrowHead = 64;   // Hopper's tiles have 128 queries up to here, Ampere's 32
constexpr int kFewStepsOfDq = 4;  // with no more steps of a tile of dQ, two passes are as fast
constexpr double kAmpere = 2;     // a block of keys, and all work, take Ampere's kernel so many times as long

}  // namespace h200

/// These constants are fitted to 140 shapes, in up to six orders each, on an H100 (docs/performance.md). A step is one
/// tile of queries of one head that a block of keys meets.
namespace h100 {

constexpr double kEndsOfBlock = 2;          // prologue and epilogue of a thread block, in steps,
constexpr double kEndsOfNext = 1.3;         // of a block of keys that is not a thread block's first,
constexpr double kEndsOfPart = 2.5;         // and of a part, whose gradients are float32
constexpr double kJoin = 4000;              // the kernel that joins the parts, beside what it moves, in nanoseconds
constexpr double kFewestSteps = 4;          // of the longest part
constexpr std::int64_t kMostWaves = 8;      // of thread blocks with a part, which bounds the workspace
constexpr std::int64_t kDealtWaves = 16;    // with more waves of blocks of keys no more than a usual order is tried
constexpr double kKept = 0.5;               // share of the L2 cache that keeps what the blocks of a section share;
constexpr double kSlower = 0.23;            // what is beyond it, by the size of the L2 cache, takes so much more time
constexpr double kSharedByGroup = 0.4;      // and so does the share of a further query head, whose turn comes later
constexpr int kMostOfGroup = 7;             // up to so many of them
constexpr double kClearly = 0.95;           // unusual sections have to take no more than this share of the time,
constexpr double kClearlyParts = 0.98;      // more parts no more than this,
constexpr double kClearlyTwoPasses = 0.93;  // and where there are two passes no more than this

}  // namespace h100

int key_blocks(const Problem& p, const Variant& v) {
  return std::max(Spans::tiles(p.seqlen_k, v.tile_n), 1);
}

/// Dealing gives the blocks of keys of a backward to thread blocks, each to the first that is free. Times are in steps.
class Dealing {
 public:
  Dealing(const Problem& problem, const Variant& v, int at_once)
      : p_(problem),
        v_(v),
        at_once_(at_once),
        heads_(p_.batch * p_.heads_k),
        in_order_(p_.deterministic && !v.two_passes()) {
    const Lengths lengths = p_.lengths();
    const int group = p_.group();
    for (int n = 0; n < key_blocks(p_, v); ++n) {
      const Range keys = {n * v.tile_n, std::min((n + 1) * v.tile_n, p_.seqlen_k)};
      const BlockWalk queries = p_.mask().transposed().walk(keys, queries_of_step(v), lengths.transposed());
      const bool whole_heads = in_order_ && (p_.band != Band::full() || p_.column_masked());  // see KeyBlock
      blocks_.push_back(whole_heads ? Block{group, queries.blocks()} : Block{group * queries.blocks(), 1});
      longest_ = std::max(longest_, blocks_.back().steps());
      most_parts_ = std::max(most_parts_, blocks_.back().units);
    }
    if (!v.two_passes()) return;
    const std::int64_t tiles = std::int64_t{p_.batch} * p_.heads_q * Spans::tiles(p_.seqlen_q, v.tile_m);
    if (tiles > h100::kDealtWaves * at_once) {
      const double step = step_of_queries(v) * kQueriesOfPass / v.tile_m;  // of as many queries as in the other pass
      for (const Block& block : blocks_) work_of_queries_ += step * heads_ * block.steps();
      return;
    }
    for (int end = p_.seqlen_q; end > 0; end = (end - 1) / v.tile_m * v.tile_m) {
      const Range rows = {(end - 1) / v.tile_m * v.tile_m, end};
      query_tiles_.push_back(step_of_queries(v) * p_.mask().walk(rows, v.tile_n, lengths).blocks());
    }
  }

  int longest() const { return longest_; }        // steps of the longest block of keys
  int most_parts() const { return most_parts_; }  // into which a block of keys can be divided

  /// Returns when the last thread block ends, if each takes one part of a block of keys; or, where they are persistent,
  /// one after the other, whose tiles are being loaded while the gradients of the last one are stored.
  double time(int parts, int heads_at_once, bool persistent) const {
    const double ends = parts > 1 ? h100::kEndsOfPart : persistent ? h100::kEndsOfNext : h100::kEndsOfBlock;
    std::priority_queue<double, std::vector<double>, std::greater<>> busy(
        {}, std::vector<double>(static_cast<std::size_t>(at_once_),
                                h100::kEndsOfBlock - std::min(ends, h100::kEndsOfBlock)));
    double end = 0, dealt = 0;
    const auto deal = [&](double work) {
      dealt += work;
      const double until = busy.top() + work;
      busy.pop();
      busy.push(until);
      end = std::max(end, until);
    };
    const auto deal_query_tiles = [&] {
      const int all = p_.batch * p_.heads_q, heads = query_heads_at_once(p_, heads_at_once);
      for (int first = 0; first < all; first += heads)
        for (const double tile : query_tiles_)
          for (int head = first; head < std::min(first + heads, all); ++head) deal(tile + h100::kEndsOfBlock);
    };
    const bool queries_first = !query_tiles_.empty() && queries_come_first(p_, v_, parts);
    if (queries_first) deal_query_tiles();
    for (int first = 0; first < heads_; first += heads_at_once) {
      const int heads = std::min(heads_at_once, heads_ - first);
      for (const Block& block : blocks_)
        for (int i = 0; i < heads * parts; ++i) deal(block.steps_of_part(i % parts, parts) + ends);
    }
    if (!queries_first) deal_query_tiles();
    end = std::max(end, (dealt + work_of_queries_) / at_once_);          // so many small pieces fill all gaps
    return end + (in_order_ ? static_cast<double>(blocks_.size()) : 0);  // a head's last block waits for its first
  }

  /// Returns the same if `grid` thread blocks take one block of keys after the other, in rounds of alternate direction.
  double time_of_rounds(int grid, int heads_at_once) const {
    const int blocks = static_cast<int>(blocks_.size()), all = blocks * heads_;
    double end = 0;
    for (int of_round = 0; of_round < grid; ++of_round) {
      double time = h100::kEndsOfBlock - h100::kEndsOfNext;
      for (int first = 0, place = of_round; first < all; first += grid, place = grid - 1 - place) {
        if (first + place >= all) continue;
        const int rank = BlockOfSection::at(unsigned(first + place), heads_, blocks, heads_at_once).rank;
        time += blocks_[static_cast<std::size_t>(rank)].steps() + h100::kEndsOfNext;
      }
      end = std::max(end, time);
    }
    return end;
  }

 private:
  /// The steps of a block of keys come in units that belong to one part.
  struct Block {
    int units, steps_of_unit;
    int steps() const { return units * steps_of_unit; }
    int steps_of_part(int part, int parts) const {
      const int length = (units + parts - 1) / parts;
      return std::clamp(units - part * length, 0, length) * steps_of_unit;
    }
  };

  Problem p_;
  Variant v_;
  int at_once_, heads_;
  bool in_order_;
  std::vector<Block> blocks_;        // of one KV head
  std::vector<double> query_tiles_;  // steps of the tiles of one query head in the pass for dQ, the longest first,
  double work_of_queries_ = 0;       // or the steps of all heads, where these are too many to deal
  int longest_ = 0, most_parts_ = 0;
};

/// Returns how many persistent thread blocks usually take the blocks of keys, in `parts` parts each, or 0 where each
/// part has a thread block of its own. Two passes, or Hopper's one pass over ragged sequences, take one wave of them.
/// So does one pass over dense sequences where a block meets so few queries that its prologue and epilogue matter, or
/// where rounds are full without a mask, so that no thread block has a block less than others: unless heads are so long
/// that their queries do not stay in the L2 cache. There persistent thread blocks drift apart, and each loads them
/// anew, while those of a new wave begin together. Under a mask such a wave is made of whole heads, so that rounds in
/// alternate directions give each thread block equal work; it is not taken where it would leave too many
/// multiprocessors idle.
///
/// Where dQ is summed in a fixed order, each thread block takes the next block of keys that nobody has taken, so that a
/// block only ever waits for one that already runs. That pays only in short heads, of which more can share the L2 cache
/// than have to wait for each other.
int persistent_blocks(const Problem& p, const Variant& v, const DeviceInfo& device, int parts) {
  const int wave = device.multiprocessors;
  if (v.two_passes() || (p.ragged && v.one_pass())) return wave;
  const std::int64_t queries = std::int64_t{p.group()} * p.seqlen_q / parts;
  if (p.ragged || !v.may_loop() || queries == 0) return 0;
  const int blocks = key_blocks(p, v);
  const double rounds = 1.0 * p.batch * p.heads_k * blocks * parts / wave;
  const bool stays = query_bytes_of_head(p, v) <= static_cast<double>(device.l2_bytes);
  const bool full =
      p.band == Band::full() && !p.deterministic && stays && rounds > h200::kFullRounds * std::ceil(rounds);
  if (queries > h200::kFewQueries && !full) return 0;
  if (p.deterministic && std::int64_t{blocks} * v.head_dim * v.head_dim > h200::kShortHead) return 0;
  if (p.deterministic || p.band == Band::full()) return wave;
  const int of_whole_heads = wave / (blocks * parts) * (blocks * parts);
  return of_whole_heads < h200::kBusy * wave ? 0 : of_whole_heads;
}

KeyBlockOrder usual_order(const Problem& p, const Variant& v, const DeviceInfo& device, std::int64_t tiles, int parts) {
  const int persistent = persistent_blocks(p, v, device, parts);
  const bool several = v.may_loop() && persistent > 0 && persistent < tiles * parts;
  return {parts, heads_at_once(p, v, device, key_blocks(p, v), several), persistent};
}

/// Returns how much longer steps take because the L2 cache does not keep what the blocks share that run at a time,
/// those of the heads of a section, or of more where a section is less than a wave.
double slower(const KeyBlockOrder& order, const Problem& p, const Variant& v, const DeviceInfo& device) {
  const int of_wave = device.multiprocessors / (key_blocks(p, v) * order.parts);
  const int heads = std::max(order.heads_at_once, std::min(of_wave, p.batch * p.heads_k));
  const int later = std::min(p.group() - 1, h100::kMostOfGroup);
  const double shared = query_bytes_of_head(p, v) * heads * (1 + h100::kSharedByGroup * later);
  return 1 + h100::kSlower * std::max(shared / static_cast<double>(device.l2_bytes) - h100::kKept, 0.0);
}

/// Returns the dealings by which a problem is estimated: of a ragged batch, one of sequences that are equally long, and
/// one of uneven ones.
std::vector<Dealing> dealings(const Problem& p, const Variant& v, int at_once) {
  std::vector<Dealing> found = {Dealing(p.dense(), v, at_once)};
  if (!p.ragged) return found;
  found.emplace_back(as_uneven(p), v, at_once);
  return found;
}

/// Returns the time of an order in nanoseconds. `sections` says whether its heads at once make a difference.
double time_of(const KeyBlockOrder& order, const Dealing& dealing, const BackwardPlan& plan, const DeviceInfo& device,
               bool sections) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const bool several = sections && v.one_pass() && order.persistent > 0 && order.persistent < plan.tiles * order.parts;
  const bool in_rounds = several && go_in_rounds(p, v, key_blocks(p, v), order.parts, order.persistent);
  double steps = in_rounds ? dealing.time_of_rounds(order.persistent, order.heads_at_once)
                           : dealing.time(order.parts, order.heads_at_once, several);
  if (sections) steps *= slower(order, p, v, device);
  const double columns = v.head_dim + v.head_dim_v, matmuls = v.two_passes() ? 4 : 5;
  const double of_step = matmuls * queries_of_step(v) * v.tile_n * columns / counted::kFlops;
  if (order.parts == 1) return steps * of_step;
  const double floats = static_cast<double>(plan.tiles * order.parts * v.tile_n) * columns;
  const double join = v.one_pass() ? h200::kJoinOfOnePass : h100::kJoin;
  return steps * of_step + join + 2 * 4 * floats / counted::kBytes;  // they are written, then read
}

/// Returns, of the orders that are tried, the one that ends first. Narrow sections come before wide ones, and few parts
/// before many, since what comes later has to be clearly better.
KeyBlockOrder best_order(const BackwardPlan& plan, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const int of_multiprocessor = v.arch == Arch::kSm90 ? 1 : std::max(device.max_shared_memory / plan.shared_memory, 1);
  const int at_once = device.multiprocessors * of_multiprocessor;
  const KeyBlockOrder usual = usual_order(p, v, device, plan.tiles, 1);
  if (plan.tiles == 0 || plan.tiles > h100::kDealtWaves * at_once) return usual;
  const std::vector<Dealing> dealt = dealings(p, v, at_once);
  const bool sections = v.arch == Arch::kSm90 && !p.ragged && !p.deterministic && p.band != Band::full();
  KeyBlockOrder best = usual;
  const auto time = [&](const KeyBlockOrder& order) {
    double sum = 0;
    for (const Dealing& dealing : dealt) sum += time_of(order, dealing, plan, device, sections);
    return sum;
  };
  double least = time(usual);
  const auto consider = [&](const KeyBlockOrder& order, double share) {
    const double here = time(order);
    if (here < share * least) best = order, least = here;
  };
  const double fewest_steps = v.one_pass() ? h200::kFewestStepsOfOnePass : h100::kFewestSteps;
  const std::int64_t most = std::min<std::int64_t>(h100::kMostWaves * at_once / plan.tiles, dealt.back().most_parts());
  for (int parts = 1; parts == 1 || parts <= most; parts += 1 + parts / 32) {  // of many, not each number is tried
    if (parts > 1 && parts * fewest_steps > dealt.back().longest()) break;
    if (parts > 1)
      consider(usual_order(p, v, device, plan.tiles, parts),
               v.two_passes() ? h100::kClearlyTwoPasses : h100::kClearlyParts);
    if (!sections) continue;
    const int heads = p.batch * p.heads_k;
    const auto waves = static_cast<int>(plan.tiles * parts / device.multiprocessors);
    // Sections are of equal size. Narrower ones than usual were slower with groups.
    for (int n = std::clamp(waves, 1, heads / usual.heads_at_once); n >= 1; n -= 1 + n / 5) {
      if (v.one_pass()) consider({parts, (heads + n - 1) / n, 0}, h100::kClearly);
      if (waves > 0 || v.two_passes()) consider({parts, (heads + n - 1) / n, device.multiprocessors}, h100::kClearly);
    }
  }
  return best;
}

}  // namespace

bool has_few_queries(const Problem& p, const Variant& v, const DeviceInfo& device) {
  if (v.arch != Arch::kSm90 || p.ragged || p.deterministic || p.dropout.active() || p.seqlen_q == 0) return false;
  const double multiprocessors = device.multiprocessors;
  const double blocks = double{1} * p.batch * p.heads_k * key_blocks(p, v);
  if (v.one_pass()) return v.head_dim <= h200::kNarrowHead && p.seqlen_q <= v.tile_m / 2 && blocks >= multiprocessors;
  if (blocks == 0) return false;
  // Times are in steps of the pass for dK and dV, as in Dealing. The last tile of queries sees most keys.
  const int last = (p.seqlen_q - 1) / v.tile_m * v.tile_m;
  const int steps = p.mask().walk({last, p.seqlen_q}, v.tile_n, p.lengths()).blocks();
  const double tile = h100::kEndsOfBlock + step_of_queries(v) * steps;
  const double tiles = double{1} * p.batch * p.heads_q * Spans::tiles(p.seqlen_q, v.tile_m);
  const double block = h100::kEndsOfBlock + double{1} * p.group() * Spans::tiles(p.seqlen_q, kQueriesOfPass);
  const double even = (blocks * block + tiles * tile) / multiprocessors;
  return steps > h200::kFewStepsOfDq && tile > h200::kAmpere * std::max(block, even);
}

KeyBlockOrder order_for_any_batch(const BackwardPlan& plan, const DeviceInfo& device) {
  const int parts = std::max(plan.problem.group() / h200::kHeadsOfPart, 1);
  return usual_order(plan.problem, plan.variant, device, plan.tiles, parts);
}

KeyBlockOrder order_key_blocks(const BackwardPlan& plan, const DeviceInfo& device) {
  struct Key {
    Problem problem;
    Variant variant;
    int multiprocessors = 0;
    std::int64_t l2_bytes = 0, tiles = 0;
    bool operator==(const Key&) const = default;
  };
  Key key{plan.problem, plan.variant, device.multiprocessors, device.l2_bytes, plan.tiles};
  key.problem.dropout = {};  // its seed is another in each call
  static thread_local Recent<Key, KeyBlockOrder, 32> recent;
  return recent.get(key, [&] { return best_order(plan, device); });
}

}  // namespace flashtile
