#include "select/choose.h"

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

}  // namespace

bool prefers_rows_of_128(const Problem& p, const DeviceInfo& device) {
  constexpr int kRows = 192, kFewKeys = 80, kWidestOfThreeBoxes = 72;  // a tile of D128 has so many rows, and keys
  if (p.wider_head_dim() <= 64 || p.wider_head_dim() >= 96 || p.ragged) return false;
  const std::int64_t tiles = std::int64_t{p.batch} * p.heads_q * ((p.seqlen_q + kRows - 1) / kRows);
  return p.seqlen_k <= kFewKeys || (p.wider_head_dim() <= kWidestOfThreeBoxes && tiles > device.multiprocessors);
}

Features features_of(const Problem& p, Kind kind, const Variant& v) {
  const bool forward = kind == Kind::kForward, backward = kind == Kind::kBackward, cache = kind == Kind::kKvcache;
  const bool on_ampere = v.arch == Arch::kSm80, on_hopper = v.arch == Arch::kSm90;
  return when(p.dropout.active() && !cache, Features::kDropout) |
         when(p.sinks && (forward || (cache && on_hopper)), Features::kSinks) |
         when(p.deterministic && backward && on_ampere, Features::kOrderedDq) |
         when(p.softcap > 0 && backward && v.one_pass(), Features::kSoftcap) |
         when(p.softcap > 0 && on_hopper && is_unusual_softcap(p, backward), Features::kUnusualSoftcap);
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
