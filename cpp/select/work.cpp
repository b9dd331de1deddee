#include "select/work.h"

#include <algorithm>
#include <limits>
#include <string>

#include "flashtile/error.h"

namespace flashtile {
namespace {

/// Waking a thread costs about as much as this many FLOPs of its work.
constexpr double kFlopsPerThread = 1 << 20;

}  // namespace

int countable(const char* tensor, std::int64_t count, const char* of_what) {
  if (count > std::numeric_limits<int>::max())
    throw Unsupported(std::string(tensor) + " has " + std::to_string(count) + " " + of_what +
                      ", expected fewer than 2^31");
  return static_cast<int>(count);
}

std::int64_t rows_of_sequence(const Problem& p) {
  return std::int64_t{p.seqlen_q} * p.group();
}

std::int64_t tiles_of_rows(const Problem& p, const Variant& v, int heads) {
  const std::int64_t rows = std::int64_t{p.seqlen_q} * heads;
  if (p.ragged) return rows / v.tile_m + std::max(p.batch, 1);
  return p.batch * ((rows + v.tile_m - 1) / v.tile_m);
}

int threads_for(std::int64_t tiles, Cost cost, const DeviceInfo& device) {
  const double useful = std::min(static_cast<double>(tiles), cost.flops / kFlopsPerThread);
  return static_cast<int>(std::clamp<double>(useful, 1, device.threads));
}

void share_out(Plan& plan, Cost cost, const DeviceInfo& device) {
  const Problem& p = plan.problem;
  const auto items = [&](int heads) { return p.heads_q / heads * tiles_of_rows(p, plan.variant, heads); };
  const int threads = threads_for(items(1), cost, device);
  const bool packs = !p.alibi && !p.dropout.active() && !p.column_masked() && rows_of_sequence(p) < Band::kUnbounded;
  plan.packed_heads = packs ? std::max(p.group(), 1) : 1;  // q may have no head
  while (p.group() % plan.packed_heads != 0 || (plan.packed_heads > 1 && items(plan.packed_heads) < threads))
    --plan.packed_heads;
  plan.tiles = items(plan.packed_heads);
  plan.grid = threads_for(plan.tiles, cost, device);
}

}  // namespace flashtile
