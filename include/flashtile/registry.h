// The kernels that exist: one row per line of cpp/variants/*.def, in the same order.
#pragma once

#include <span>

#include "flashtile/kvcache.h"
#include "flashtile/plan.h"

namespace flashtile {

struct ForwardRow {
  Variant variant;
  ForwardKernel run;  // null in a build without CUDA, for CUDA rows
};
struct BackwardRow {
  Variant variant;
  BackwardKernel run;
};
struct KvcacheRow {
  Variant variant;
  KvcacheKernel run;
};

std::span<const ForwardRow> forward_rows();
std::span<const BackwardRow> backward_rows();
std::span<const KvcacheRow> kvcache_rows();

}  // namespace flashtile
