// This file answers which row of a table computes a problem, and refuses a problem that none does. A row serves a
// problem if it is wide enough and knows the features that it asks for; select takes the narrowest of those, and of
// several that are equally narrow the one with the least estimated time.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "flashtile/error.h"
#include "flashtile/plan.h"
#include "flashtile/registry.h"
#include "select/estimate.h"

namespace flashtile {

inline constexpr const char* kNarrowest = "the first row of this dtype that is wide enough";
inline constexpr const char* kSmallerTile =
    "the first row of this dtype that is wide enough and fits the GPU's shared memory";
inline constexpr const char* kSplitKeys = "too few tiles to fill the GPU, so the keys of each are split";
inline constexpr const char* kFewKeys = "so few keys and tiles that a persistent kernel would have nothing to overlap";
inline constexpr const char* kFastest = "of the rows that are just wide enough, the one with the least estimated time";

/// A row that knows features that nobody asks for takes up to so many times as long: see Features. Sinks are not among
/// these, as they cost nothing in the row that knows nothing else.
inline constexpr double kTimeOfIdleFeatures = 1.2;

/// Returns the features that a problem asks of the row `v` and that not every row of the table `kind` knows on that
/// architecture. A row whose features include the answer can compute the problem, so nothing else has to ask for
/// options.
Features features_of(const Problem& problem, Kind kind, const Variant& v);

/// Returns whether a forward on Hopper has so few keys, and so few tiles, that Ampere's kernel is faster: it begins
/// sooner and has less code to fetch. It is so where each of its thread blocks has a multiprocessor to itself, and
/// where two share one, as long as those of Hopper, whose tiles are taller, would need two rounds, or heads are narrow.
bool has_few_keys(const Problem& problem, const DeviceInfo& device);

/// Returns whether a forward on Hopper is faster with the rows of D128 than with those of D96, though these are wide
/// enough. They load a row of at most 72 columns by two boxes of TMA, not by three, which counts where all
/// multiprocessors read at once, and have fewer keys to a tile, which counts where there is only one. Both
/// were measured on H100s, for dense batches (docs/performance.md).
bool prefers_rows_of_128(const Problem& problem, const DeviceInfo& device);

/// Returns the bytes of shared memory that a thread block of the kernel takes: none on a CPU.
int shared_memory_of(Kind kind, const Variant& v);

/// Throws Unsupported, since no row runs on so old a GPU.
[[noreturn]] void refuse_device(const DeviceInfo& device);

/// Throws Unsupported, and says what the rows of `arch` do serve.
template <class Row>
[[noreturn, gnu::cold]] void refuse_problem(const Problem& problem, Arch arch, std::span<const Row> rows) {
  std::string dtypes;
  int widest = 0;
  for (const Row& row : rows) {
    if (row.variant.arch != arch) continue;
    const std::string dtype = name_of(row.variant.dtype);
    if (dtypes.find(dtype) == dtypes.npos) dtypes += (dtypes.empty() ? "" : " or ") + dtype;
    if (row.variant.dtype == problem.dtype) widest = std::max(widest, row.variant.head_dim);
  }
  const std::string place = " on " + name_of(problem.device);
  if (widest == 0)
    throw Unsupported("q has dtype " + std::string(name_of(problem.dtype)) + place + ", expected " + dtypes);
  throw Unsupported("q or v has head dimension " + std::to_string(problem.wider_head_dim()) + place +
                    ", expected at most " + std::to_string(widest) + " (less where shared memory is short)");
}

/// Returns whether a row is of a problem's dtype, wide enough for it and knows the features that it asks for. One that
/// finds the largest logits writes them.
template <class Row>
bool serves(const Row& row, const Problem& p) {
  const Variant& v = row.variant;
  return v.dtype == p.dtype && v.head_dim >= p.head_dim && v.head_dim_v >= p.head_dim_v &&
         v.knows(features_of(p, Row::kKind, v)) &&
         (p.max_logits || v.arch != Arch::kSm90 || !v.knows(Features::kMaxLogits));
}

/// Returns the architecture whose kernels a GPU runs. Hopper has its own for head dimensions up to the widest of
/// `rows`, and falls back to Ampere's where none of them serves; every newer GPU runs Ampere's.
template <class Row, class Suits>
Arch gpu_arch(std::span<const Row> rows, const DeviceInfo& device, const Problem& problem, const Suits& suits) {
  const auto on_hopper = [&](const Row& row) {
    return row.variant.arch == Arch::kSm90 && serves(row, problem) && suits(row);
  };
  return device.compute_capability == 90 && std::ranges::any_of(rows, on_hopper) ? Arch::kSm90 : Arch::kSm80;
}

/// This lets every row pass.
inline constexpr auto kEveryRow = [](const auto&) { return true; };

template <class Row>
struct Choice {
  const Row* row = nullptr;
  Estimate estimate;
  const char* why = "";
};

/// Takes, of the rows that `suits` lets pass, the one whose `estimate_of(row, problem)` is least.
template <class Row, class Suits, class EstimateOf>
Choice<Row> choose(const Problem& problem, const DeviceInfo& device, std::span<const Row> rows, const Suits& suits,
                   const EstimateOf& estimate_of) {
  constexpr int kOldestComputeCapability = 80;
  const Problem estimated = problem.dense();
  const bool on_cpu = problem.device.type == DeviceType::kCpu;
  if (!on_cpu && device.compute_capability < kOldestComputeCapability) refuse_device(device);
  const Arch arch = on_cpu ? Arch::kCpu : gpu_arch(rows, device, problem, suits);
  Choice<Row> best{.why = kNarrowest};
  double least = 0;
  for (const Row& row : rows) {
    const Variant& v = row.variant;
    if (v.arch != arch || !serves(row, problem) || !suits(row)) continue;
    if (best.row && (v.head_dim != best.row->variant.head_dim || v.head_dim_v != best.row->variant.head_dim_v)) break;
    if (shared_memory_of(Row::kKind, v) > device.max_shared_memory) {
      best.why = kSmallerTile;
      continue;
    }
    const Estimate here = estimate_of(row, estimated);
    if (best.row && here.time == 0) break;  // there is nothing to compare: the first that fits is taken
    const bool idle = (v.features | Features::kSinks) != (features_of(estimated, Row::kKind, v) | Features::kSinks);
    const double time = idle ? kTimeOfIdleFeatures * here.time : here.time;
    if (best.row) best.why = kFastest;
    if (!best.row || time < least) best.row = &row, best.estimate = here, least = time;
  }
  if (best.row) return best;
  refuse_problem(problem, arch, rows);
}

/// Does the same by the estimate that is usual for the rows of this table.
template <class Row, class Suits>
Choice<Row> choose(const Problem& problem, const DeviceInfo& device, std::span<const Row> rows, const Suits& suits) {
  return choose(problem, device, rows, suits, [](const Row& row, const Problem& p) { return estimate(row, p); });
}

/// Returns what the time of a key goes by in rows of different head dimensions: all are multiplied to their full width.
inline double width_of(const Variant& v) {
  return v.head_dim + v.head_dim_v;
}

/// Takes the row of a forward; instead of it one of Ampere's where keys are few, or one that splits keys, where Hopper
/// has one that serves and its estimate is clearly less. Sinks are no feature of such a row, as they are added when the
/// parts of a row are joined.
template <class Row, class Suits>
Choice<Row> choose_forward(Problem problem, const DeviceInfo& device, std::span<const Row> rows,
                           const Suits& usually_suits) {
  const auto time = [&](const Row& row, const Problem& p) { return estimate_forward(row.variant, p, device); };
  if (Row::kKind == Kind::kForward && has_few_keys(problem, device)) {
    const auto on_ampere = [&](const Row& row) { return row.variant.arch == Arch::kSm80 && usually_suits(row); };
    Choice<Row> choice = choose(problem, device, rows, on_ampere, time);
    choice.why = kFewKeys;
    return choice;
  }
  const bool wider = Row::kKind == Kind::kForward && prefers_rows_of_128(problem, device);
  const auto suits = [&](const Row& row) {
    return usually_suits(row) && !(wider && row.variant.arch == Arch::kSm90 && row.variant.head_dim == 96);
  };
  const auto whole = choose(problem, device, rows, suits, time);
  problem.sinks = false;
  const auto splits = [&](const Row& row) { return row.variant.may_split() && suits(row); };
  const auto serves_split = [&](const Row& row) { return splits(row) && serves(row, problem); };
  if (whole.row->variant.arch != Arch::kSm90 || problem.column_masked() || !std::ranges::any_of(rows, serves_split))
    return whole;
  Choice<Row> split = choose(problem, device, rows, splits,
                             [&](const Row& row, const Problem& p) { return estimate_splits(row.variant, p, device); });
  split.why = kSplitKeys;
  const double found = split.estimate.time * width_of(split.row->variant) / width_of(whole.row->variant);
  return found > 0 && found < counted::kClearly * whole.estimate.time ? split : whole;
}

}  // namespace flashtile
