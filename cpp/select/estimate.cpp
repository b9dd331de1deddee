#include "select/estimate.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "select/work.h"

namespace flashtile {
namespace {

/// These constants are fitted to runs on an H200 (docs/performance.md). Other GPUs go by them too.
namespace h200 {

// A tile of 192 rows of Hopper's forward is faster in the steady state than one of 128, but has a longer prologue and
// epilogue.
constexpr double kSpeedOf192Rows = 1.06;        // speed per row relative to a tile of 128,
constexpr double kSpeedOf192NarrowRows = 1.24;  // and at head dimension 64
constexpr double kEndsOf128Rows = 100;          // a tile's prologue and epilogue, in the time of keys
constexpr double kEndsOf192Rows = 180;

// In Hopper's backward of one pass this is the time of a query in tiles of 80 queries, relative to tiles of 64.
constexpr double kQueryOf80 = 0.945;

// A tile of 16 rows over a cache takes as long as its keys take to read. This is the time of a tile of 64, which takes
// longer for its matmuls, relative to that.
constexpr double kTileOf64Rows = 2.2;

}  // namespace h200

/// Returns how many keys a tile is multiplied with, on average: those that its queries see, and those that are wasted
/// in the tiles at the mask's edges.
double keys_per_tile(const Variant& v, const Problem& p, HeadPacking packing) {
  const double all = (p.seqlen_k + v.tile_n - 1) / v.tile_n * v.tile_n;
  if (p.band == Band::full() || p.seqlen_q == 0) return all;
  const double seen = static_cast<double>(p.visible_elements()) / p.seqlen_q;
  return std::min(all, seen + (packing.query(v.tile_m) + v.tile_n) / 2.0);
}

double estimated_time(const Variant& v, const Problem& p, HeadPacking packing) {
  const bool large = v.tile_m == 192;
  const double speed = large ? (v.head_dim == 64 ? h200::kSpeedOf192NarrowRows : h200::kSpeedOf192Rows) * 128 / 192 : 1;
  const double ends = large ? h200::kEndsOf192Rows : h200::kEndsOf128Rows;
  const int tiles = (packing.rows(p.seqlen_q) + v.tile_m - 1) / v.tile_m;
  return tiles * (keys_per_tile(v, p, packing) / speed + ends) / packing.heads();
}

/// Packs as many heads of a GQA group as the 16 rows of one warp hold. It packs none where int cannot count the rows of
/// so long a sequence, nor where heads have ALiBi slopes, since a tile has one slope, nor with dropout, whose random
/// words are indexed by the rows of a head.
HeadPacking widest_packing(const Problem& p) {
  if (p.seqlen_q >= 1 << 25 || p.alibi || p.dropout.active()) return {};
  return {std::min(std::countr_zero(static_cast<unsigned>(p.group())), 4)};
}

Estimate estimate_forward(const Variant& v, const Problem& p) {
  if (v.arch != Arch::kSm90) return {};
  const Estimate plain{estimated_time(v, p, {}), {}};
  const Estimate packed{estimated_time(v, p, widest_packing(p)), widest_packing(p)};
  return packed.time < plain.time ? packed : plain;
}

}  // namespace

Estimate estimate(const ForwardRow& row, const Problem& p) {
  return estimate_forward(row.variant, p);
}

/// The kernel of one pass takes as long as the queries that the tiles of a block of keys go through, on average: those
/// that see a key, those that are wasted at the mask's edges, and the padding of the last tile.
Estimate estimate(const BackwardRow& row, const Problem& p) {
  const Variant& v = row.variant;
  if (!v.one_pass() || p.seqlen_k == 0) return {};
  double queries = (p.seqlen_q + v.tile_m - 1) / v.tile_m * v.tile_m;
  if (p.band != Band::full()) {
    const double hidden = p.seqlen_q - static_cast<double>(p.visible_elements()) / p.seqlen_k;
    const double edges = v.tile_n / 2.0 + (v.tile_n % v.tile_m == 0 ? 0 : v.tile_m / 2.0);
    queries -= std::max(hidden - edges, 0.0);
  }
  return {queries * (v.tile_m == 80 ? h200::kQueryOf80 : 1), {}};
}

Estimate estimate(const KvcacheRow& row, const Problem& p) {
  const Variant& v = row.variant;
  if (v.arch == Arch::kCpu) return {};
  const auto tiles = static_cast<double>(std::max<std::int64_t>((rows_of_sequence(p) + v.tile_m - 1) / v.tile_m, 1));
  return {tiles * (v.tile_m == 16 ? 1 : h200::kTileOf64Rows), {}};
}

Estimate estimate_prefill(const Variant& v, const Problem& p, const DeviceInfo& device) {
  Estimate found = estimate_forward(v, p);
  if (p.band != Band::full() && std::int64_t{4} * p.seqlen_q > p.seqlen_k) return found;
  const std::int64_t tiles = (found.packing.rows(p.seqlen_q) + v.tile_m - 1) / v.tile_m;
  const auto all = static_cast<double>(tiles * p.batch * (p.heads_q / found.packing.heads()));
  const double waves = all / device.multiprocessors;
  if (waves > 0) found.time *= std::ceil(waves) / waves;
  return found;
}

}  // namespace flashtile
