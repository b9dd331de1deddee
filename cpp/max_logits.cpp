#include "max_logits.h"

#include <algorithm>
#include <limits>

#include "device.h"
#include "flashtile/begin_max_logits.h"

namespace flashtile {

void clear_max_logits(const Variant& variant, const TensorView& out, const TensorView& max_logits, Stream stream) {
  const bool launch_does = variant.arch == Arch::kSm90 && variant.knows(Features::kMaxLogits) && !out.empty();
  if (!max_logits.given() || max_logits.empty() || launch_does) return;
  const auto largest = LargestScores::of(max_logits);
  if (max_logits.device.type == DeviceType::kCpu) {
    const std::int64_t count = max_logits.shape[0] * largest.heads;
    std::fill_n(largest.of_heads, count, -std::numeric_limits<float>::infinity());
    return;
  }
#ifdef FLASHTILE_WITH_CUDA
  const DeviceGuard guard(max_logits.device);
  begin_max_logits(largest, static_cast<int>(max_logits.shape[0]), max_logits.device, stream);
#else
  static_cast<void>(stream);
  refuse_without_cuda("max_logits is on " + name_of(max_logits.device));
#endif
}

}  // namespace flashtile
