#include "select/choose.h"

#include "flashtile/forward_memory.h"

namespace flashtile {
namespace {

constexpr Features when(bool asked, Features feature) {
  return asked ? feature : Features::kNone;
}

/// Returns whether Hopper leaves a softcap to Ampere's rows. A large one is unusual, because the tanh of Hopper's
/// kernels is too coarse for it. In a backward a softcap of stretched scores (see ScoreMap) is unusual too: Hopper's
/// derives the softcap's slope from the score, which therefore has to be the tanh itself, of a row that is not steep
/// (see math/state.h), and no row is steep under a usual softcap.
bool is_unusual_softcap(const Problem& p, bool backward) {
  const ScoreMap map = p.score_map();
  return map.capped && (p.softcap > kUsualSoftcap || (backward && map.stretched));
}

constexpr int kTallTile = 192;  // rows of the tallest tile of Hopper's forward

/// Returns how many tiles of so many rows a dense forward has, without packs.
std::int64_t dense_tiles(const Problem& p, int rows) {
  return std::int64_t{p.batch} * p.heads_q * Spans::tiles(p.seqlen_q, rows);
}

/// These were read off ninety shapes on an H200, each between calls of other kernels (docs/performance.md). On an H100
/// the two kernels were not compared.
namespace h200 {

constexpr int kMostKeys = 64;     // one block of Ampere's forward
constexpr int kRows = 128;        // of one of its tiles
constexpr int kWidestHead = 128;  // above this its tiles have half as many rows
constexpr int kNarrowHead = 64;   // up to this a second thread block on a multiprocessor costs little

}  // namespace h200

}  // namespace

bool has_few_keys(const Problem& p, const DeviceInfo& device) {
  if (p.device.type != DeviceType::kCuda || device.compute_capability != 90 || p.ragged || p.column_masked() || p.fp8)
    return false;
  if (p.wider_head_dim() > h200::kWidestHead || p.seqlen_k > h200::kMostKeys) return false;
  const std::int64_t tiles = dense_tiles(p, h200::kRows), wave = device.multiprocessors;
  const bool in_two = p.wider_head_dim() <= h200::kNarrowHead || dense_tiles(p, kTallTile) > wave;
  return tiles <= (in_two ? 2 * wave : wave);
}

bool prefers_rows_of_128(const Problem& p, const DeviceInfo& device) {
  constexpr int kKeys = 80, kWidestOfThreeBoxes = 72;  // a tall tile of D128 has so many keys
  if (p.wider_head_dim() <= 64 || p.wider_head_dim() >= 96 || p.ragged) return false;
  return p.seqlen_k <= kKeys ||
         (p.wider_head_dim() <= kWidestOfThreeBoxes && dense_tiles(p, kTallTile) > device.multiprocessors);
}

Features features_of(const Problem& p, Kind kind, const Variant& v) {
  const bool forward = kind == Kind::kForward, backward = kind == Kind::kBackward, cache = kind == Kind::kKvcache;
  const bool takes_columns = (forward && v.may_mask() && (v.maps_masked() || !p.score_map().maps())) ||
                             (backward && v.may_mask_backward()) || (cache && v.arch == Arch::kSm80);
  const bool on_ampere = v.arch == Arch::kSm80, on_hopper = v.arch == Arch::kSm90;
  return when(p.dropout.active() && !cache, Features::kDropout) |
         when(p.sinks && (forward || (cache && on_hopper)), Features::kSinks) |
         when(p.deterministic && backward && on_ampere, Features::kOrderedDq) |
         when(p.softcap > 0 && backward && v.one_pass(), Features::kSoftcap) |
         when(p.column_masked() && !takes_columns, Features::kColumnMask) |
         when(p.softcap > 0 && on_hopper && is_unusual_softcap(p, backward), Features::kUnusualSoftcap) |
         when(p.max_logits && on_hopper && !backward, Features::kMaxLogits);
}

int shared_memory_of(Kind kind, const Variant& v) {
  if (v.arch == Arch::kCpu) return 0;
  if (kind == Kind::kBackward) return backward_shared_memory(v);
  return kind == Kind::kKvcache && v.arch == Arch::kSm80 ? kvcache_shared_memory(v) : forward_shared_memory(v);
}

[[gnu::cold]] void refuse_device(const DeviceInfo& device) {
  const int cc = device.compute_capability;
  throw Unsupported("q is on " + name_of(device.device) + " (" + device.name + ", compute capability " +
                    std::to_string(cc / 10) + "." + std::to_string(cc % 10) +
                    "), expected compute capability 8.0 (Ampere) or newer");
}

}  // namespace flashtile
