// This file says how a raw score Q·K becomes a score that softmax takes, and then an exponent of 2: a GPU computes exp2
// in one instruction, ex2.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "flashtile/macros.h"

namespace flashtile {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLargest = std::numeric_limits<float>::max();

/// Models have softcaps of 15 to 50. Kernels for Hopper serve softcaps up to this one with a tanh whose absolute error
/// is 1e-7, so that no score is off by more than 6e-5.
inline constexpr float kUsualSoftcap = 512;

/// ScoreMap is scale, softcap and ALiBi as one map from raw scores to scores, which are logits in a unit of their own:
///
///   plain       score = raw, in units of scale
///   capped      score = tanh(inner · raw), in units of softcap
///   stretched   score = outer · raw − slope · |j − diagonal|, of the tanh if it is capped too; the unit is 1
///
/// So the unit is always positive, and one multiplication, which the exponent's FMA does at no cost, makes a score the
/// exponent of 2. The factor of a difference of scores is rounded, but no score is: however large scores are, their
/// differences are as exact as they themselves. Masked scores are −inf.
struct ScoreMap {
  float inner = 0;
  float outer = 1;
  float unit = 1;
  float unit_log2 = kLog2e;  // unit · log2 e, which makes scores exponents of 2
  bool capped = false;
  bool stretched = false;
  static constexpr int kNearTerms = 4;
  static constexpr float kNear = 0.4f;
  float near = -1;                    // up to which |raw| tanh_near() may be asked; below 0: of none
  float near_terms[kNearTerms] = {};  // the minimax coefficients of tanh(x) / x in x², times powers of `inner`

  static ScoreMap of(float scale, float softcap, bool alibi) {
    // A softcap of 2^122 or more counts as none: float32 shows its effect on scores above some 2^110 alone. Below it
    // scale / softcap keeps its precision. Units stay within what quotient() divides by.
    ScoreMap map{.capped = softcap > 0 && softcap < 0x1p122f};
    const float factor = map.capped ? softcap : scale;
    map.inner = map.capped ? std::clamp(scale / softcap, -kLargest, kLargest) : 0;
    // With factors out of this range, no model's, powers of them would leave float32.
    if (std::fabs(map.inner) >= 0x1p-13f && std::fabs(map.inner) <= 0x1p13f) map.near = kNear / std::fabs(map.inner);
    double power = map.inner;
    int term = 0;
    for (const double of_x : {0.999999573, -0.333297261, 0.132505668, -0.0468257252}) {
      map.near_terms[term++] = static_cast<float>(of_x * power);
      power *= double{map.inner} * map.inner;
    }
    map.stretched = alibi || !(factor > 0) || factor > 0x1p124f;
    map.outer = map.stretched ? factor : 1;
    map.unit = map.stretched ? 1 : factor;
    map.unit_log2 = map.unit * kLog2e;
    return map;
  }

  FLASHTILE_HOST_DEVICE bool maps() const { return capped || stretched; }

  /// Replaces raw scores up to `near`, where |inner · raw| is at most kNear, by tanh(inner · raw), to 6e-8. Those that
  /// are given together take each step together, as each step of one of them waits for the one before.
  template <int kCount>
  FLASHTILE_HOST_DEVICE void tanh_near(float (&raw)[kCount]) const {
    float square[kCount], sum[kCount];
    for (int i = 0; i < kCount; ++i) square[i] = raw[i] * raw[i], sum[i] = near_terms[kNearTerms - 1];
    for (int n = kNearTerms - 2; n >= 0; --n)
      for (int i = 0; i < kCount; ++i) sum[i] = fmaf(sum[i], square[i], near_terms[n]);
    for (int i = 0; i < kCount; ++i) raw[i] *= sum[i];
  }
};

}  // namespace flashtile
