// A Part is a partial result over some of the keys: four columns of one row of the output, and the row's softmax state.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/online_softmax.h"
#include "flashtile/math/state.h"

namespace flashtile {

/// The output over the keys that the part has seen is o / state.sum.
struct Part {
  float4 o{0, 0, 0, 0};
  RowState state;

  /// Joins the partial result of other keys to this one. Parts are joined in the order of their keys, each operation
  /// rounds by itself, and a part that saw no key changes nothing: the same parts give the same bits, wherever they are
  /// joined.
  CUTE_DEVICE void join(Part const& other, float unit_log2) {
    const float reference = fmaxf(state.reference, other.state.reference);
    const float origin = reference == -kInfinity ? 0.0f : reference;  // a difference of infinities would be NaN
    const auto factor = [&](float of) { return exp2_approx((of - origin) * unit_log2); };
    const float a = factor(state.reference);
    const float b = factor(other.state.reference);
    const auto sum = [&](float x, float y) { return __fmaf_rn(b, y, __fmul_rn(a, x)); };
    o = {sum(o.x, other.o.x), sum(o.y, other.o.y), sum(o.z, other.o.z), sum(o.w, other.o.w)};
    state = {reference, sum(state.sum, other.state.sum)};
  }

  CUTE_DEVICE void scale(float factor) { o = {factor * o.x, factor * o.y, factor * o.z, factor * o.w}; }
};

}  // namespace flashtile
