// This file makes e4m3 weights of the scores of e4m3 numbers, in Hopper's forward kernel.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// Rounds four numbers to e4m3, whose largest number, 448, larger ones become.
CUTE_DEVICE std::uint32_t round_to_e4m3(float a, float b, float c, float d) {
  std::uint32_t word;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

/// DescaledWeights are what a consumer thread knows of the descales of its tile and of the current block. Nothing is
/// multiplied with them but what is multiplied anyway:
///
///   q, k   an exponent is raw · unit_log2 − offset, one FMA: the unit contains that of q for a tile, and that of k for
///          64 columns of a block. References are scores times the descale of k.
///   v      weights are multiplied with it before they are rounded, relative to one that the tile's output is
///   multiplied
///          with at its end: that of the tile's first block, until a block's is far from it. Exponents have its
///          logarithm added. The sums of weights are divided by it again.
///
/// A weight must not exceed 448. OnlineSoftmax learns of it as of a reference that was outgrown, by a sum that is
/// infinite.
template <class Mainloop>
struct DescaledWeights {
  using Softmax = typename Mainloop::Softmax;
  static constexpr int kHalves = Mainloop::kDescales;
  static constexpr float kLargest = 448;
  /// The largest weight of a tile's first block is 2^kShift. e4m3 loses precision below 2^-6, and ends at 2^-9.
  static constexpr float kShift = 1;
  /// Weights are multiplied with at most 2^kMost of V, and at least 2^kLeast, unless all values are 0, by descale or as
  /// such: these have 2^kOfZeros, which makes their weights 0.
  static constexpr float kMost = 8, kLeast = kShift - 3, kOfZeros = -100;

  float q = 1;            // that of the tile's rows
  float k[kHalves];       // what the current block's scores still have to be multiplied with
  float v_log2[kHalves];  // what its weights are multiplied with
  float of_values_log2;   // what the output has to be multiplied with

  /// Begins a tile, whose first block is `block`. Mapped scores are multiplied with all descales before.
  CUTE_DEVICE void begin(float q_descale, typename Mainloop::BlockDescales const& block, Softmax& softmax,
                         float unit_log2, bool maps) {
    q = q_descale;
    of_values_log2 = block.v_log2[0] - kShift;
    softmax.unit_log2 = maps ? unit_log2 : unit_log2 * q;
  }
  /// Goes on with a block.
  CUTE_DEVICE void take(typename Mainloop::BlockDescales const& block, bool maps) {
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      k[i] = maps ? block.k[i] * q : block.k[i];
      const bool zeros = block.v_log2[i] <= kLog2OfNoDescale;
      v_log2[i] = zeros ? kOfZeros : block.v_log2[i] - of_values_log2;
    }
  }

  /// Multiplies scores (row, column) with what they still have to be multiplied with.
  template <class Scores>
  CUTE_DEVICE void multiply(Scores&& scores) {
    constexpr int kColumns = cute::size<1>(decltype(scores.layout()){});
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) scores(r, c) *= k[c * kHalves / kColumns];
    }
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) k[i] = 1;
  }

  /// Returns whether the output has to become relative to another descale of V.
  CUTE_DEVICE bool is_far() const {
    const float most = most_of_values();
    return most > kMost || (most < kLeast && most != kOfZeros);
  }
  /// Makes it so, and returns what was summed of the output has to be multiplied with. It depends on descales alone, so
  /// that no row's bits depend on other rows.
  CUTE_DEVICE float move() {
    if (!is_far()) return 1;
    const float by = most_of_values() - kShift;
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) v_log2[i] = v_log2[i] == kOfZeros ? kOfZeros : v_log2[i] - by;
    of_values_log2 += by;
    return exp2f(-by);
  }

  /// Does what OnlineSoftmax::weigh() does. Unless `fits` is known, the sum of a row is infinite if a weight may exceed
  /// 448. Scores are a wgmma accumulator; in each word of the weights are those of two columns, and of the two eight
  /// further on (see ValueTransposerSm90).
  template <class Scores, class Weights>
  CUTE_DEVICE void weigh(Softmax const& softmax, Scores const& scores, Weights&& weights, typename Softmax::Sums& added,
                         bool related, bool fits) const {
    using namespace cute;
    auto words = recast<std::uint32_t>(weights);
    constexpr int kWords = size(decltype(words.layout()){});
    float sum[kHalves][2], unit[kHalves], less[kHalves][2];
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      unit[i] = softmax.unit_log2 * k[i];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) less[i][r] = softmax.offset_of(r, related) - v_log2[i];
    }
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const int r = w % 2, first = w / 2 * 8 + 2 * r, i = w * kHalves / kWords;
      float weight[4];
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n)
        weight[n] = exp2_approx(fmaf(scores(first + n / 2 * 4 + n % 2), unit[i], -less[i][r]));
      words(w) = round_to_e4m3(weight[0], weight[1], weight[2], weight[3]);
      const float four = (weight[0] + weight[1]) + (weight[2] + weight[3]);
      sum[i][r] = w % (kWords / kHalves) < 2 ? four : sum[i][r] + four;
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float all = 0, true_sum = 0;
      CUTE_UNROLL
      for (int i = 0; i < kHalves; ++i) {
        all += sum[i][r];
        true_sum = fmaf(sum[i][r], exp2_approx(-v_log2[i]), true_sum);
      }
      added.of_row[r] = fits || all <= kLargest ? true_sum : kInfinity;
    }
  }

  /// Makes the rows of a finished tile those of scores in units of the score map, and multiplies its output.
  template <class Rows>
  CUTE_DEVICE void finish(Softmax& softmax, Rows&& rows, bool maps) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!maps && softmax.row[r].reference != -kInfinity) softmax.row[r].reference *= q;
    }
    const float of_values = exp2f(of_values_log2), factor[2] = {of_values, of_values};
    scale_rows(rows, factor);
  }

 private:
  CUTE_DEVICE float most_of_values() const {
    float most = v_log2[0];
    CUTE_UNROLL
    for (int i = 1; i < kHalves; ++i) most = fmaxf(most, v_log2[i]);
    return most;
  }
};

/// Kernels for 16 bits have this instead.
struct NotDescaled {};

}  // namespace flashtile
