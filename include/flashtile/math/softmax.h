// How a raw score Q·K becomes an exponent. Everything is kept in the log2 domain, where exp is one ex2 instruction.
#pragma once

#include "flashtile/macros.h"

namespace flashtile {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// scale, softcap and ALiBi as one map from a raw score to log2(e) · logit:
///
///   without softcap:  outer · raw                         (outer = scale · log2 e)
///   with softcap c:   outer · tanh(inner · raw)           (outer = c · log2 e, inner = scale / c)
///   and with ALiBi:   … − slope_log2 · |j − diagonal|
///
/// Masked elements are set to −inf after the map.
struct ScoreMap {
  float outer_log2 = 0;
  float inner = 0;  // 0: no softcap

  static ScoreMap of(float scale, float softcap) {
    // With a scale of 0, or next to it, tanh is linear.
    if (softcap > 0 && scale / softcap != 0) return {softcap * kLog2e, scale / softcap};
    return {scale * kLog2e, 0};
  }

  FLASHTILE_HOST_DEVICE bool capped() const { return inner != 0; }

  /// A positive linear map keeps order: a kernel may take row maxima of raw scores and scale inside the exponent.
  FLASHTILE_HOST_DEVICE bool order_preserving() const { return !capped() && outer_log2 > 0; }
};

}  // namespace flashtile
