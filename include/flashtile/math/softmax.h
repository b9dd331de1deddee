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
  float unit_log2 = kLog2e;   // unit · log2 e, which makes scores exponents of 2
  float outer_log2 = kLog2e;  // outer · unit_log2
  bool capped = false;
  bool stretched = false;
  // Near 0 tanh is a polynomial: up to kNear with three terms, and up to kFurther with four, which softcaps take that
  // are so small that scores are often above the former.
  static constexpr int kNearTerms = 4;
  static constexpr float kNear = 0.22f, kFurther = 0.4f, kSmallSoftcap = 24;
  float near = 0;                          // up to which |raw| tanh_near() may be asked
  float near_terms[kNearTerms] = {};       // minimax coefficients of tanh(x) / x in x², times powers of `inner`
  float near_terms_log2[kNearTerms] = {};  // these, times unit_log2: with them the polynomial is an exponent of 2

  static ScoreMap of(float scale, float softcap, bool alibi) {
    // A softcap of 2^122 or more counts as none: float32 shows its effect on scores above some 2^110 alone. Below it
    // scale / softcap keeps its precision. Units stay within what quotient() divides by.
    ScoreMap map{.capped = softcap > 0 && softcap < 0x1p122f};
    const float factor = map.capped ? softcap : scale;
    map.inner = map.capped ? std::clamp(scale / softcap, -kLargest, kLargest) : 0;
    map.stretched = alibi || !(factor > 0) || factor > 0x1p124f;
    map.outer = map.stretched ? factor : 1;
    map.unit = map.stretched ? 1 : factor;
    map.unit_log2 = map.unit * kLog2e;
    map.outer_log2 = map.outer * map.unit_log2;
    map.find_near(softcap < kSmallSoftcap);
    return map;
  }

  FLASHTILE_HOST_DEVICE bool maps() const { return capped || stretched; }
  FLASHTILE_HOST_DEVICE bool three_near_terms() const { return near_terms[kNearTerms - 1] == 0; }

  /// Replaces raw scores up to `near`, |inner · raw| of kNear or kFurther, by tanh(inner · raw), to 6e-8. Those that
  /// are given together take each step together, as each step of one of them waits for the one before.
  template <int kCount>
  FLASHTILE_HOST_DEVICE void tanh_near(float (&raw)[kCount]) const {
    float square[kCount], sum[kCount];
    for (int i = 0; i < kCount; ++i) square[i] = raw[i] * raw[i], sum[i] = near_terms[kNearTerms - 1];
    for (int n = kNearTerms - 2; n >= 0; --n)
      for (int i = 0; i < kCount; ++i) sum[i] = fmaf(sum[i], square[i], near_terms[n]);
    for (int i = 0; i < kCount; ++i) raw[i] *= sum[i];
  }

 private:
  void find_near(bool further) {
    // With factors out of this range, no model's, powers of them would leave float32.
    if (!(std::fabs(inner) >= 0x1p-13f && std::fabs(inner) <= 0x1p13f)) return;
    constexpr double kTerms[2][kNearTerms] = {{0.9999993576, -0.3332265224, 0.1288779671, 0},
                                              {0.9999995734, -0.3332972611, 0.1325056667, -0.0468257197}};
    near = (further ? kFurther : kNear) / std::fabs(inner);
    double power = inner;
    for (int n = 0; n < kNearTerms; ++n, power *= double{inner} * inner) {
      near_terms[n] = static_cast<float>(kTerms[further][n] * power);
      near_terms_log2[n] = static_cast<float>(kTerms[further][n] * power * unit_log2);
    }
  }
};

}  // namespace flashtile
