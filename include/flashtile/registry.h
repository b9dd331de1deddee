// This file lists the kernels that exist: one row per line of cpp/variants/*.def, in the same order.
#pragma once

#include <cstdint>
#include <span>

#include "flashtile/kvcache.h"
#include "flashtile/plan.h"

namespace flashtile {

/// This says in which table a row stands.
enum class Kind : std::uint8_t { kForward, kBackward, kKvcache };

struct ForwardRow {
  static constexpr Kind kKind = Kind::kForward;
  Variant variant;
  ForwardKernel run;  // null for a CUDA kernel in a build without CUDA
};
struct BackwardRow {
  static constexpr Kind kKind = Kind::kBackward;
  Variant variant;
  BackwardKernel run;
};
struct KvcacheRow {
  static constexpr Kind kKind = Kind::kKvcache;
  Variant variant;
  KvcacheKernel run;
};

/// A row for batch-invariant calls on Hopper has a launcher over keys in rows, and one over a cache, for which the plan
/// of the forward is KvcachePlan::prefill. Rows that share tiles out have the latter alone (see fixed_parts.h).
struct InvariantRow {
  static constexpr Kind kKind = Kind::kForward;
  Variant variant;
  ForwardKernel run;
  KvcacheKernel run_over_cache;
};

std::span<const ForwardRow> forward_rows();
std::span<const BackwardRow> backward_rows();
std::span<const KvcacheRow> kvcache_rows();
std::span<const InvariantRow> invariant_rows();

}  // namespace flashtile
