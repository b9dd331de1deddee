// This file makes the plan for many query rows over a cache on Hopper, where the forward kernel goes over it as over
// ragged sequences, or, with few tiles, as over a dense batch.
#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "flashtile/flashtile.h"
#include "flashtile/forward_memory.h"
#include "flashtile/prefill.h"
#include "select/choose.h"
#include "select/plans.h"
#include "select/work.h"

namespace flashtile {
namespace {

constexpr const char* kPrefill = "many rows over a cache, on Hopper: the forward kernel";
constexpr const char* kWidening = "many rows over 8-bit numbers, on Hopper: the forward kernel, which widens them";
constexpr const char* kWidened = "many rows over 8-bit numbers, on Hopper: widened, then the forward kernel";
constexpr const char* kCopied = "many rows over a cache that TMA loads slowly, or not: copied, then the forward kernel";

constexpr std::int64_t kRoomForCopy = std::int64_t{2} << 30;  // bytes of all rows that a kernel ahead writes, at most

constexpr int kFewRows = 16;  // sequences of no more rows are left to the kernels over a cache: one of their tiles

/// These were read off a few shapes on H200s (docs/performance.md).
namespace h200 {

// The forward kernel that widens 8-bit numbers does so for each tile of rows, and takes longer than that for 16
// bits: 1.4 times as long at D256, 1.1 times at D128. A kernel ahead widens them once for all rows, and pays from so
// many rows of a KV head on that see a key. Of float16 queries keys take a fourth of the instructions.
constexpr int kRowsOfWidening = 1536;
constexpr int kRowsOfWideningHalves = 8192;  // at D128, of float16
constexpr int kRowsOfWideningWide = 640;     // above D128

// TMA loads a tile in boxes of rows that lie in one page, and a box of 8 rows takes it nearly as long as one of 16. A
// kernel ahead copies all rows once, and pays from so many rows of a KV head on that see a key: of kRowsOfCopying for
// each box that 16 keys take beyond the first; and of kRowsOfCopyingGathered for each column of a head, where warps
// gather rows.
constexpr int kRowsOfCopying = 1024;
constexpr int kRowsOfCopyingGathered = 3;

// TMA loads a row of D96 by three boxes of 32 columns, and one of D128, zeros beyond the head dimension included, by
// two of 64. In boxes of so few rows that counts for more than the zeros, with heads as narrow as this one in any.
constexpr int kShortBox = 16;
constexpr int kNarrowOfThreeBoxes = 72;

// Where the forward kernel does not serve 8-bit numbers, no kernel ahead widens them for so few rows: one tile of
// Ampere's kernel, which reads them as they are.
constexpr int kRowsOfOneTile = 64;

// Above kFewRows the forward kernel took 0.4 to 0.9 of the time of Ampere's tiles of 64 rows, over 8-bit numbers 0.25
// to 0.9. But few tiles of narrow heads, which take 8 to 20 µs, took up to 1.13 times as long, and up to 1.4 times
// where queries are ragged, which need a kernel ahead: they are left to Ampere's below kRowsOfFewTiles.
constexpr int kNarrowHead = 64, kFewTiles = 16;
constexpr int kNarrowRaggedHead = 128, kFewRaggedTiles = 128;
constexpr int kRowsOfFewTiles = 32;

// With ALiBi a tile of the forward kernel has rows of one head alone, while Ampere's have rows of a group. This is the
// time of a key of such a tile, in keys of Ampere's tiles of 16 rows, and how many of these one kernel takes besides:
// the forward up to D128, Ampere's above.
constexpr double kKeyOfOneHead = 1.2, kKeyOfOneWideHead = 0.8;
constexpr double kBesideKeys = 40000;

// In a mixed batch whose keys are split the empty parts of sequences of few queries are written at this rate, in bytes
// in a nanosecond, all that comes with a tile included.
constexpr double kBytesOfEmptyParts = 500;

}  // namespace h200

// These are estimates, which held in eight mixed batches on an H200 (docs/performance.md): the queries that a chunk of
// a prompt is taken to have, and the fewest beside a token of each sequence that are worth a kernel of their own.
constexpr int kOfChunk = 512, kOfAllChunks = 256;
constexpr double kClearlyOfChunks = 0.8;  // as the host does not know how many chunks there are

/// Returns how many queries a sequence may have that is left to the kernels over a cache.
int few_queries(const Problem& p) {
  return kFewRows / std::max(p.group(), 1);
}

/// Returns whether ragged queries are taken to be a mixed batch, as serving has it: some chunks of prompts, and a token
/// or a few drafts of each other sequence. The host knows no more than their numbers. Where the mean is that of a
/// chunk, tokens hide behind the others; where there are few queries beside one of each sequence, no chunk is among
/// them.
bool is_mixed(const KvcacheProblem& cache) {
  const Problem& p = cache.problem;
  return p.ragged && p.batch > 1 && few_queries(p) > 0 && !is_fp8(cache.stored()) &&
         p.seqlen_q - p.batch >= kOfAllChunks && p.seqlen_q / p.batch < kOfChunk / 2;
}

/// Returns whether all heads that a tile packs have one column mask, if there is one.
bool packs_share_masks(const Problem& p) {
  return !p.column_masked() || p.heads_q / p.masks_of_entry % std::max(p.group(), 1) == 0;
}

/// Returns whether Ampere's tiles have rows of 256 columns, as those of all wider heads.
bool is_wide(const Problem& p) {
  return p.wider_head_dim() > 128;
}

/// Returns whether the forward kernel is faster than a kernel over a cache although no tile has rows of several heads.
bool has_many_rows_of_head(const Problem& p, const DeviceInfo& device) {
  constexpr int kRowsOfTile = 128;
  const double keys = 1.0 * Spans::tiles(p.seqlen_q, kRowsOfTile) * p.batch * p.heads_q * p.seqlen_k;
  const double over_cache = std::min(time_over_cache(16, p, device), time_over_cache(64, p, device));
  return is_wide(p) ? h200::kKeyOfOneWideHead * keys <= over_cache + h200::kBesideKeys
                    : h200::kKeyOfOneHead * keys + h200::kBesideKeys <= over_cache;
}

/// Returns whether sequences have so many rows that the forward kernel is faster than a kernel over a cache.
bool has_many_rows(const KvcacheProblem& cache, const DeviceInfo& device) {
  const Problem &p = cache.problem, dense = as_dense(cache);
  if (p.alibi && !has_many_rows_of_head(dense, device)) return false;
  const std::int64_t tiles = std::int64_t{p.batch} * p.heads_k;
  const bool few_tiles = p.wider_head_dim() <= (p.ragged ? h200::kNarrowRaggedHead : h200::kNarrowHead) &&
                         tiles < (p.ragged ? h200::kFewRaggedTiles : h200::kFewTiles);
  return rows_of_sequence(dense) >= (few_tiles ? h200::kRowsOfFewTiles : kFewRows + 1);
}

/// Returns whether the forward kernel can go over the cache, or a copy of it, and has enough rows to do. It splits keys
/// as it likes, asks one column mask for a tile, and an int has to count all rows of the cache, and those of q.
bool may_prefill(const KvcacheProblem& cache, const DeviceInfo& device) {
  const Problem& p = cache.problem;
  if (device.compute_capability != 90 || cache.num_splits > 0 || !packs_share_masks(p)) return false;
  const std::int64_t keys = std::int64_t{p.batch} * p.seqlen_k;
  const std::int64_t rows_of_cache = std::int64_t{cache.pages} * cache.page_size;
  return keys > 0 && std::max({keys, rows_of_cache, cache.queries()}) < Band::kUnbounded &&
         (has_many_rows(cache, device) || is_mixed(cache));
}

/// This holds the plan of a forward over a cache, if Hopper has a row that serves, and the function that launches it.
struct Found {
  std::optional<ForwardPlan> forward;
  KvcacheKernel run = nullptr;
};

/// Returns the time, in keys of a 128-row tile, that sequences of few queries in a mixed batch take from the forward
/// kernel where keys are split: it has a tile of each pack and split of them, which writes an empty part.
double time_of_empty_parts(const Variant& v, const Problem& p, HeadPacking packing, int splits) {
  const double tiles = 1.0 * p.batch * packing.packs_of(p.heads_q) * splits;
  return tiles * v.tile_m * v.head_dim_v * 4 / h200::kBytesOfEmptyParts / counted::time_of_key(v);
}

/// Chooses a row for the sequences of a call: of a mixed batch for its chunks. Keys of these are split where that
/// clearly pays, with whatever sequences of few queries are among them. Heads are packed for sequences of the mean
/// length: of such short ones a tile of one head would have few rows, and a chunk has as many tiles with either
/// packing.
template <class Row, class Suits>
Choice<Row> choose_for(const KvcacheProblem& cache, const DeviceInfo& device, std::span<const Row> rows,
                       const Suits& suits) {
  Problem sequences = as_ragged(cache);
  const Problem of_mean_length = sequences.dense();
  if (!is_mixed(cache)) return choose_forward(sequences, device, rows, suits);
  sequences.batch = std::clamp(sequences.seqlen_q / kOfChunk, 1, sequences.batch);
  sequences.seqlen_k = sequences.batch * cache.problem.seqlen_k;
  Choice<Row> choice = choose_forward(sequences, device, rows, suits);
  const Variant& v = choice.row->variant;
  const HeadPacking packing = packing_of_fewest_tiles(v, of_mean_length);
  if (const int splits = choice.estimate.splits; splits > 1) {
    const Estimate whole = estimate_forward(v, sequences.dense(), device);
    const double time = choice.estimate.time + time_of_empty_parts(v, cache.problem, packing, splits);
    if (time > kClearlyOfChunks * whole.time) choice.estimate = whole;
  }
  choice.estimate.packing = packing;
  return choice;
}

/// Returns the rows for what a cache holds. Those for 8 bits stand there as what they become: rows of q's dtype.
std::vector<KvcacheRow> rows_for(const KvcacheProblem& cache) {
  std::vector<KvcacheRow> rows;
  for (KvcacheRow row : kvcache_rows()) {
    if (row.variant.dtype != cache.stored()) continue;
    row.variant = as_of_queries(row.variant, cache.problem.dtype);
    rows.push_back(row);
  }
  return rows;
}

/// Returns the problem as the forward kernel is planned. A column mask of the last keys is asked in the few blocks that
/// have one of them, and changes nothing else.
Problem without_mask(Problem p) {
  p.masks_of_entry = p.masked_entries = 0;
  return p;
}

/// Returns whether a row of the table loads pages by so many boxes that one for wider heads, which takes fewer, is
/// faster.
bool has_many_boxes(const KvcacheProblem& cache, const Variant& v) {
  const int rows = rows_of_box(cache, v);
  const bool short_boxes = rows > 0 && rows <= h200::kShortBox;
  const bool narrow = cache.of_sequence > 1 && cache.problem.wider_head_dim() <= h200::kNarrowOfThreeBoxes;
  return v.head_dim == 96 && (short_boxes || narrow);
}

Found over_pages(const KvcacheProblem& cache, const DeviceInfo& device) {
  const bool widens = is_fp8(cache.stored());
  const auto suits = [&](const KvcacheRow& row) {
    const Variant& v = row.variant;
    return v.arch == Arch::kSm90 && (!widens || rows_of_box(cache, v) > 0) && !has_many_boxes(cache, v);
  };
  const std::vector<KvcacheRow> rows = rows_for(cache);
  if (gpu_arch(std::span(rows), device, without_mask(cache.problem), suits) != Arch::kSm90) return {};
  const Problem sequences = as_ragged(cache);
  const auto choice = choose_for(cache, device, std::span(rows), suits);
  const auto planned = [&](const Problem& p) {
    ForwardPlan plan = plan_tiles(p, choice.row->variant, choice.estimate, device);
    plan.shared_memory = ForwardMemorySm90::of(plan.variant, widens).bytes;
    return plan;
  };
  // Where no tile waits for another, none has to be handed out by the lengths that the GPU finds: that would take a
  // kernel ahead, and a part of this one's time. And where q has gaps, its rows are no ragged sequences.
  if (!cache.problem.ragged) {
    ForwardPlan dense = planned(without_mask(cache.problem));
    if (dense.tiles <= device.multiprocessors || !cache.q_in_line) return {std::move(dense), choice.row->run};
  }
  return {planned(sequences), choice.row->run};
}

Found over_rows(const KvcacheProblem& cache, const DeviceInfo& device) {
  const Problem sequences = as_ragged(cache);
  const auto choice = choose_for(cache, device, forward_rows(), kEveryRow);
  if (choice.row->variant.arch != Arch::kSm90) return {};
  Found found{plan_tiles(sequences, choice.row->variant, choice.estimate, device), prefill_kernel()};
  found.forward->run = choice.row->run;
  return found;
}

/// Takes a row of kvcache.def where there is a table, where numbers are widened, or under a column mask, as only its
/// kernels look pages up, widen, and ask masks of the last keys; and where that makes a dense batch. A contiguous cache
/// has a page for each sequence then, unless it has rows all the same (see has_rows). Any other goes through the usual
/// kernel, over rows.
Found over_cache(const KvcacheProblem& cache, const DeviceInfo& device) {
  Found found = over_pages(cache, device);
  const bool dense = found.forward && !found.forward->problem.ragged;
  const bool only_pages = cache.has_table || cache.has_gaps || cache.has_leftpad || !cache.q_in_line ||
                          is_fp8(cache.stored()) || cache.problem.column_masked();
  return only_pages || dense ? found : over_rows(cache, device);
}

bool select_widened(KvcachePlan& plan, const DeviceInfo& device) {
  return select_over_copy(plan, device, select_prefill, kWidened, kRoomForCopy);
}

/// Returns how many rows of a KV head see a key, in the mean.
std::int64_t rows_of_key(const KvcacheProblem& cache) {
  const Problem p = as_dense(cache);
  return p.seqlen_k > 0 ? p.visible_elements() / p.seqlen_k * p.group() : 0;
}

/// Returns whether a kernel ahead is to widen 8-bit numbers.
bool pays_to_widen(const KvcacheProblem& cache) {
  const Problem& p = cache.problem;
  const int width = p.wider_head_dim();
  const int rows = is_wide(p)                                 ? h200::kRowsOfWideningWide
                   : width > 64 && p.dtype == DType::kFloat16 ? h200::kRowsOfWideningHalves
                                                              : h200::kRowsOfWidening;
  return rows_of_key(cache) > rows;
}

/// Plans the call over a copy of a cache whose entries are no whole number of rows apart. How a cache lies should
/// change no bits, so the copy goes through the kernel for pages, as the cache would in line.
bool select_out_of_line(KvcachePlan& plan, const DeviceInfo& device) {
  if (is_mixed(plan.cache)) return false;
  const auto select_over_pages = [](KvcachePlan& copy, const DeviceInfo& gpu) {
    copy.cache.has_gaps = true;  // it has none, but over_cache() takes the kernel for pages then
    return select_prefill(copy, gpu);
  };
  return select_over_copy(plan, device, select_over_pages, kCopied, kRoomForCopy);
}

}  // namespace

bool pays_to_copy(const KvcacheProblem& cache, const Variant& v) {
  if (is_fp8(cache.stored()) || is_mixed(cache)) return false;
  const std::int64_t rows = rows_of_key(cache);
  const int of_box = rows_of_box(cache, v);
  if (of_box == 0) return rows > h200::kRowsOfCopyingGathered * cache.problem.wider_head_dim();
  return rows * (16 - std::min(of_box, 16)) > std::int64_t{h200::kRowsOfCopying} * of_box;
}

Problem as_dense(const KvcacheProblem& cache) {
  Problem p = cache.problem.dense();
  p.seqlen_k = cache.problem.seqlen_k;
  return p;
}

Problem as_ragged(const KvcacheProblem& cache) {
  Problem sequences = without_mask(cache.problem);
  sequences.ragged = true;
  sequences.seqlen_q = static_cast<int>(cache.queries());
  sequences.seqlen_k = cache.problem.batch * cache.problem.seqlen_k;
  return sequences;
}

void complete(KvcachePlan& plan, ForwardPlan forward, KvcacheKernel run, const char* why) {
  plan.variant = forward.variant;
  if (is_fp8(plan.cache.stored())) plan.variant.dtype = plan.cache.stored();
  plan.packed_heads = forward.packed_heads;
  plan.tiles = forward.tiles;
  plan.grid = forward.grid;
  plan.shared_memory = forward.shared_memory;
  plan.prefill_at = rotated_bytes(plan.cache);
  plan.workspace_bytes = PrefillWorkspace::of(plan.prefill_at, plan.problem, forward).bytes;
  plan.why = why;
  plan.run = run;
  plan.prefill = std::make_shared<const ForwardPlan>(std::move(forward));
}

bool select_over_copy(KvcachePlan& plan, const DeviceInfo& device, bool (*select)(KvcachePlan&, const DeviceInfo&),
                      const char* why, std::int64_t most) {
  const KvcacheProblem& cache = plan.cache;
  const Problem& p = plan.problem;
  KvcachePlan copy;
  copy.cache = cache;
  copy.cache.narrow = DType::kOther;
  copy.cache.descales_of_rows = false;
  copy.cache.pages = p.batch;
  copy.cache.page_size = p.seqlen_k;
  copy.cache.of_sequence = 1;
  copy.cache.in_line = true;
  copy.cache.has_gaps = copy.cache.has_table = copy.cache.has_leftpad = copy.cache.appends = false;
  copy.cache.seqlen_new = copy.cache.rotary_dim = copy.cache.rotary_rows = 0;
  copy.problem = copy.cache.problem;
  plan.widened_at = rotated_bytes(cache);
  const WidenedRows rows = WidenedRows::of(plan.widened_at, p);
  if (rows.rest - plan.widened_at > most || !select(copy, device)) return false;
  plan.variant = copy.variant;
  plan.packed_heads = copy.packed_heads;
  plan.tiles = copy.tiles;
  plan.grid = copy.grid;
  plan.shared_memory = copy.shared_memory;
  plan.workspace_bytes = rows.rest + copy.workspace_bytes;
  plan.why = why;
  plan.run = widened_kernel();
  plan.prefill = copy.prefill;
  plan.widened = std::make_shared<const KvcachePlan>(std::move(copy));
  return true;
}

bool select_prefill(KvcachePlan& plan, const DeviceInfo& device) {
  const KvcacheProblem& cache = plan.cache;
  if (!may_prefill(cache, device)) return false;
  const bool widens = is_fp8(cache.stored());
  if (widens && plan.problem.column_masked()) return false;  // which no kernel that widens asks or hands on
  const bool may_widen_ahead = widens && rows_of_sequence(as_dense(cache)) > h200::kRowsOfOneTile;
  const bool pays = cache.descales_of_rows || !cache.in_line || cache.has_leftpad || pays_to_widen(cache);
  if (may_widen_ahead && pays && select_widened(plan, device)) return true;
  if (cache.descales_of_rows) return false;  // the forward kernel that widens knows one for a head
  auto [forward, run] = over_cache(cache, device);
  // A copy hands no mask on either, and is itself in line, of one page for each sequence.
  const bool is_copy = cache.in_line && !cache.has_leftpad && cache.of_sequence == 1;
  const bool may_copy = !plan.problem.column_masked() && !is_copy;
  const bool copies = may_copy && forward && pays_to_copy(cache, forward->variant);
  if (copies && select_over_copy(plan, device, select_prefill, kCopied, kRoomForCopy)) return true;
  if (!cache.in_line && !widens) return may_copy && select_out_of_line(plan, device);
  if (!cache.in_line || !forward) return may_widen_ahead && select_widened(plan, device);
  complete(plan, *std::move(forward), run, widens ? kWidening : kPrefill);
  if (is_mixed(cache)) {
    KvcachePlan few = select_few(cache, few_queries(plan.problem), device);
    plan.rotated_at = few.rotated_at;
    plan.prefill_at = few.workspace_bytes;
    plan.workspace_bytes = PrefillWorkspace::of(plan.prefill_at, plan.problem, *plan.prefill).bytes;
    plan.few = std::make_shared<const KvcachePlan>(std::move(few));
  }
  return true;
}

}  // namespace flashtile
