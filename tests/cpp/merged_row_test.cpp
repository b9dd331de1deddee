// These tests check that the results of a row over sets of keys make the row over all, whatever the split and however
// large scores are.
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

Result merged(const std::vector<Result>& results) {
  MergedRow row;
  float outputs = 0;
  for (const Result& result : results)
    if (!result.row.saw_nothing()) outputs = row.add(result.row, kUnitLog2).sum(outputs, result.out);
  return {row.row(), row.normaliser() * outputs};
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
        for (const Result& found : {merged({a, b}), merged({b, a})}) {
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
  std::vector<Result> parts;
  Result total;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    parts.push_back(result_of(&scores[i], &values[i], 1));
    total = merged({total, parts.back()});
  }
  const Result exact = result_of(scores.data(), values.data(), scores.size());
  for (const Result& found : {merged(parts), total}) {
    EXPECT_NEAR(found.out, exact.out, 1e-5);
    const float top = exact.row.reference;
    EXPECT_NEAR(weight(found.row, top) / weight(exact.row, top), 1, 1e-4);
  }
}

TEST(MergedRow, SharesAreThoseOfTheWeights) {
  for (const float ahead : {-3e38f, -200.0f, -24.0f, -0.5f, 0.0f, 1.0f, 24.0f, 200.0f, 3e38f}) {
    const FinishedRow a{7, 0.5f}, b{7, ahead + 0.5f};
    const float of_a = merged({{a, 1}, {b, 0}}).out, of_b = merged({{a, 0}, {b, 1}}).out;
    EXPECT_NEAR(of_b, 1 / (1 + std::exp2(-double{ahead})), 1e-7) << ahead;
    EXPECT_NEAR(of_a, 1 / (1 + std::exp2(double{ahead})), 1e-7) << ahead;
    EXPECT_NEAR(of_a + of_b, 1, 2e-7) << ahead;
    EXPECT_GE(merged({{a, 0}, {b, 0}}).row.log2_sum, std::max(a.log2_sum, b.log2_sum)) << ahead;
  }
}

TEST(MergedRow, OfOneResultIsThatResult) {
  for (const FinishedRow& row : {FinishedRow{-3e4f, 2.5f}, FinishedRow{3e38f, -1e-30f}, FinishedRow{0, 1e30f}})
    for (const float out : {0.3f, -1e-42f, 3e38f, kInfinity}) {
      const Result found = merged({{row, out}});
      EXPECT_EQ(found.out, out);
      EXPECT_EQ(found.row.reference, row.reference);
      EXPECT_EQ(found.row.log2_sum, row.log2_sum);
    }
}

TEST(MergedRow, OfNothingSawNothing) {
  const Result nothing = merged({});
  EXPECT_EQ(nothing.out, 0);
  EXPECT_TRUE(nothing.row.saw_nothing());
  EXPECT_EQ(nothing.row.lse(kUnit), -kInfinity);
}

TEST(MergedRow, NaNIsKept) {
  const Result row{{3, 1}, 1}, nan{{3, kNaN}, 1}, of_nan{{kNaN, 1}, 1};
  for (const Result& bad : {nan, of_nan})
    for (const auto& results :
         {std::vector{bad}, {bad, row}, {row, bad}, {bad, bad}, {row, bad, row}, {bad, row, row}}) {
      EXPECT_TRUE(std::isnan(merged(results).row.lse(kUnit)));
      EXPECT_TRUE(std::isnan(merged(results).out));
    }
  // Values of NaN count whatever their weight, as in a product of weights and values.
  const Result far_below{{-1e6f, 0}, kNaN};
  EXPECT_TRUE(std::isnan(merged({row, far_below}).out));
  EXPECT_TRUE(std::isnan(merged({far_below, row}).out));
  EXPECT_FALSE(std::isnan(merged({far_below, row}).row.lse(kUnit)));
}

}  // namespace
}  // namespace flashtile
