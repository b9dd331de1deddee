// These tests check that the results of a row over two sets of keys make the row over both, whatever the split and
// however large scores are.
#include "flashtile/math/merged_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace flashtile {
namespace {

constexpr float kUnit = 0.2f;  // the unit of scores, see ScoreMap
constexpr float kUnitLog2 = kUnit * kLog2e;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Result is what an exact forward leaves of a row; the value of a key is a number.
struct Result {
  FinishedRow row;
  float out = kNaN;  // where the row saw nothing
};

Result result_of(const float* scores, const float* values, std::size_t count) {
  if (count == 0) return {};
  const float top = *std::max_element(scores, scores + count);
  double sum = 0, value = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double weight = std::exp2((double{scores[i]} - top) * kUnitLog2);
    sum += weight;
    value += weight * values[i];
  }
  return {{top, static_cast<float>(std::log2(sum))}, static_cast<float>(value / sum)};
}

Result merged(const Result& a, const Result& b) {
  const MergedRow both = MergedRow::of(a.row, b.row, kUnitLog2);
  return {both.row, both.out(a.out, b.out)};
}

/// Returns what a backward takes for the weight of `score`.
double weight(const FinishedRow& row, double score) {
  return std::exp2((score - row.reference) * kUnitLog2 - row.log2_sum);
}

TEST(MergedRow, IsTheRowOverAllKeys) {
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  for (const float spread : {0.0f, 1.0f, 30.0f, 1e3f})
    for (const float middle : {0.0f, -3e4f, 1e9f, 1e30f}) {
      std::vector<float> scores(60), values(60);
      for (float& score : scores) score = middle + spread * normal(generator) / kUnit;
      for (float& value : values) value = normal(generator);
      const Result exact = result_of(scores.data(), values.data(), scores.size());
      for (std::size_t cut = 0; cut <= scores.size(); ++cut) {
        const Result a = result_of(scores.data(), values.data(), cut);
        const Result b = result_of(scores.data() + cut, values.data() + cut, scores.size() - cut);
        for (const Result& found : {merged(a, b), merged(b, a)}) {
          EXPECT_NEAR(found.out, exact.out, 1e-6) << middle << ' ' << spread << " cut at " << cut;
          const float top = exact.row.reference;
          EXPECT_NEAR(weight(found.row, top), weight(exact.row, top), 1e-6) << middle << ' ' << spread << ' ' << cut;
        }
      }
    }
}

TEST(MergedRow, OfManyPartsKeepsItsPrecision) {
  std::mt19937 generator(5);
  std::normal_distribution<float> normal;
  std::vector<float> scores(1000), values(1000);
  for (float& score : scores) score = 1e6f + 2 * normal(generator) / kUnit;
  for (float& value : values) value = normal(generator);
  Result total{.out = 0};
  for (std::size_t i = 0; i < scores.size(); ++i) total = merged(total, result_of(&scores[i], &values[i], 1));
  const Result exact = result_of(scores.data(), values.data(), scores.size());
  EXPECT_NEAR(total.out, exact.out, 1e-5);
  const float top = exact.row.reference;
  EXPECT_NEAR(weight(total.row, top) / weight(exact.row, top), 1, 1e-4);
}

TEST(MergedRow, SharesAreThoseOfTheWeights) {
  for (const float ahead : {-3e38f, -200.0f, -24.0f, -0.5f, 0.0f, 1.0f, 24.0f, 200.0f, 3e38f}) {
    const FinishedRow a{7, 0.5f}, b{7, ahead + 0.5f};
    const MergedRow both = MergedRow::of(a, b, kUnitLog2);
    const double of_b = 1 / (1 + std::exp2(-double{ahead}));
    EXPECT_NEAR(both.share_b, of_b, 1e-7) << ahead;
    EXPECT_NEAR(both.share_a, 1 / (1 + std::exp2(double{ahead})), 1e-7) << ahead;
    EXPECT_NEAR(both.share_a + both.share_b, 1, 2e-7) << ahead;
    EXPECT_GE(both.row.log2_sum, std::max(a.log2_sum, b.log2_sum)) << ahead;
  }
}

TEST(MergedRow, WhatSawNothingDoesNotCount) {
  const FinishedRow row{-3e4f, 2.5f};
  for (const FinishedRow& blind : {FinishedRow{}, FinishedRow{kNaN, -kInfinity}, FinishedRow{3e38f, -kInfinity}}) {
    for (const float ignored : {kNaN, kInfinity, 1.0f}) {
      const MergedRow first = MergedRow::of(blind, row, kUnitLog2), last = MergedRow::of(row, blind, kUnitLog2);
      EXPECT_EQ(first.out(ignored, 0.3f), 0.3f);
      EXPECT_EQ(last.out(0.3f, ignored), 0.3f);
      for (const MergedRow& both : {first, last}) {
        EXPECT_EQ(both.row.reference, row.reference);
        EXPECT_EQ(both.row.log2_sum, row.log2_sum);
      }
      const MergedRow neither = MergedRow::of(blind, blind, kUnitLog2);
      EXPECT_EQ(neither.out(ignored, ignored), 0.0f);
      EXPECT_TRUE(neither.row.saw_nothing());
      EXPECT_EQ(neither.row.lse(kUnit), -kInfinity);
    }
  }
}

TEST(MergedRow, NaNIsKept) {
  const FinishedRow row{3, 1}, nan{3, kNaN}, of_nan{kNaN, 1};
  for (const FinishedRow& other : {row, FinishedRow{}, nan})
    for (const FinishedRow& bad : {nan, of_nan})
      for (const MergedRow& both : {MergedRow::of(bad, other, kUnitLog2), MergedRow::of(other, bad, kUnitLog2)})
        EXPECT_TRUE(std::isnan(both.row.lse(kUnit)));
  EXPECT_TRUE(std::isnan(MergedRow::of(nan, row, kUnitLog2).out(1, 1)));
  EXPECT_TRUE(std::isnan(MergedRow::of(row, nan, kUnitLog2).out(1, 1)));
  // Values of NaN count whatever their weight, as in a product of weights and values.
  const FinishedRow far_below{-1e6f, 0};
  EXPECT_TRUE(std::isnan(MergedRow::of(row, far_below, kUnitLog2).out(1, kNaN)));
  EXPECT_TRUE(std::isnan(MergedRow::of(far_below, row, kUnitLog2).out(kNaN, 1)));
}

}  // namespace
}  // namespace flashtile
