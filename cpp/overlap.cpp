#include "overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

namespace flashtile {
namespace {

using Size = std::int64_t;

Size address_of(const TensorView& t) {
  return static_cast<Size>(reinterpret_cast<std::uintptr_t>(t.data));
}

/// This answers whether `distance` is a sum of strides, each taken a number of times that lies within its limits.
class Sums {
 public:
  /// The steps lead from an element of `a` back to its first one, and from there to an element of `b`.
  Sums(const TensorView& a, const TensorView& b) {
    for (int i = 0; i < a.rank; ++i) add(a.strides[i], 0, a.shape[i] - 1);
    for (int i = 0; i < b.rank; ++i) add(b.strides[i], 1 - b.shape[i], 0);
    std::sort(steps_.begin(), steps_.begin() + count_,
              [](const Step& x, const Step& y) { return x.stride > y.stride; });
    Size least = 0, most = 0;
    for (int i = count_ - 1; i >= 0; --i) {
      steps_[i].least_behind = least, steps_[i].most_behind = most;
      least += steps_[i].least * steps_[i].stride, most += steps_[i].most * steps_[i].stride;
    }
  }

  bool reach(Size distance) { return reach(distance, 0); }
  bool gave_up() const { return trials_ >= kTrials; }

 private:
  struct Step {
    Size stride = 0;
    Size least = 0, most = 0;                // how often the stride may be taken
    Size least_behind = 0, most_behind = 0;  // bounds of the sums of all shorter strides
  };

  static constexpr int kTrials = 4096;

  void add(Size stride, Size least, Size most) {
    if (stride < 0) return add(-stride, -most, -least);
    if (stride == 0 || least == most) return;
    const auto end = steps_.begin() + count_;
    const auto same = std::find_if(steps_.begin(), end, [&](const Step& step) { return step.stride == stride; });
    if (same == end) steps_[count_++].stride = stride;
    same->least += least, same->most += most;
  }

  bool reach(Size distance, int i) {
    if (i == count_) return distance == 0;
    const Step& step = steps_[i];
    // In most tensors a stride exceeds all that the shorter ones reach; then this loop tries at most two values.
    Size times = std::max(step.least, -((step.most_behind - distance) / step.stride));
    for (; times <= step.most && trials_ < kTrials; ++times) {
      const Size rest = distance - times * step.stride;
      if (rest < step.least_behind) break;
      if (rest <= step.most_behind && (++trials_, reach(rest, i + 1))) return true;
    }
    return false;
  }

  std::array<Step, 2 * kMaxRank> steps_{};
  int count_ = 0;
  int trials_ = 0;
};

/// Returns whether each stride exceeds all that the shorter ones reach, as in what is left of a contiguous tensor whose
/// dimensions are put in another order, cut and padded.
bool is_nested(const TensorView& t) {
  std::array<Size, kMaxRank> strides{}, reaches{};
  int count = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] <= 1) continue;
    const Size stride = std::abs(t.strides[i]);
    int place = count++;
    for (; place > 0 && strides[place - 1] > stride; --place)
      strides[place] = strides[place - 1], reaches[place] = reaches[place - 1];
    strides[place] = stride, reaches[place] = (t.shape[i] - 1) * stride;
  }
  Size reach = 0;
  for (int i = 0; i < count; ++i) {
    if (strides[i] <= reach) return false;
    reach += reaches[i];
  }
  return true;
}

}  // namespace

Stretch stretch_of(const TensorView& t) {
  if (!t.given() || t.empty()) return {};
  const Size size = bytes_of(t.dtype);
  Stretch stretch{address_of(t), address_of(t) + size};
  for (int i = 0; i < t.rank; ++i) {
    const Size reach = (t.shape[i] - 1) * t.strides[i] * size;
    (reach < 0 ? stretch.begin : stretch.end) += reach;
  }
  return stretch;
}

bool share_elements(const TensorView& a, const TensorView& b) {
  if (!stretch_of(a).meets(stretch_of(b))) return false;
  const Size distance = address_of(b) - address_of(a), size = bytes_of(a.dtype);
  return distance % size == 0 && Sums(a, b).reach(distance / size);
}

bool may_overlap_itself(const TensorView& t) {
  if (t.empty() || is_nested(t)) return false;
  // Of two elements in one place, which differ in dimension i, one may be taken to be the first in it: both can be
  // moved.
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] <= 1) continue;
    TensorView first = t, others = t;
    first.shape[i] = 1;
    others.shape[i] = t.shape[i] - 1;
    Sums sums(first, others);
    if (sums.reach(t.strides[i]) || sums.gave_up()) return true;
  }
  return false;
}

}  // namespace flashtile
