// These tests check the laws of the softmax state: however the keys are split, in whatever order the parts are merged,
// and however large scores are, the result is the same.
#include "flashtile/math/state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace flashtile {
namespace {

constexpr float kUnit = 0.2f;  // the unit of scores, see ScoreMap
constexpr float kUnitLog2 = kUnit * kLog2e;

std::vector<float> random_scores(int count, float spread, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, spread / kUnit);
  std::vector<float> scores(static_cast<std::size_t>(count));
  for (float& score : scores) score = normal(generator);
  return scores;
}

double lse_of(const std::vector<float>& scores, double sink = -INFINITY) {
  double top = sink;
  for (const float s : scores) top = std::max(top, double{s} * kUnit);
  double sum = std::exp(sink - top);
  for (const float s : scores) sum += std::exp(double{s} * kUnit - top);
  return top == -INFINITY ? -INFINITY : top + std::log(sum);
}

/// This is online softmax over blocks of `block` scores, each with the running maximum as reference. `value` is Σ
/// weight · score.
struct Online {
  RowState state;
  float value = 0;

  void add(const float* scores, int count) {
    const float top = *std::max_element(scores, scores + count);
    value *= state.rebase(std::max(state.reference, top), kUnitLog2);
    for (int i = 0; i < count; ++i) {
      const float weight = std::exp2((scores[i] - state.reference) * kUnitLog2);
      state.sum += weight;
      value += weight * scores[i];
    }
  }
  RowTotal total(float sink = -kInfinity) const { return state.total(sink, kUnit); }
  FinishedRow finish(float sink = -kInfinity) const { return total(sink).finished(); }
  float lse() const { return finish().lse(kUnit); }
  float out(float sink = -kInfinity) const { return value * total(sink).normaliser; }
};

Online online(const std::vector<float>& scores, int block) {
  Online result;
  const int count = static_cast<int>(scores.size());
  for (int i = 0; i < count; i += block) result.add(scores.data() + i, std::min(block, count - i));
  return result;
}

TEST(RowState, BlocksOfAnySizeGiveTheSameRow) {
  for (const float spread : {0.1f, 3.0f, 40.0f}) {
    const std::vector<float> scores = random_scores(200, spread, 1);
    const double expected = lse_of(scores);
    const float out = online(scores, 200).out();
    for (const int block : {1, 3, 64, 199, 200}) {
      const Online result = online(scores, block);
      EXPECT_NEAR(result.lse(), expected, 1e-5 * std::max(1.0, std::abs(expected)));
      EXPECT_NEAR(result.out(), out, 1e-4f * std::max(1.0f, std::abs(out)));
    }
  }
}

TEST(RowState, AnyReferenceNearTheMaximumGivesTheSameRow) {
  const std::vector<float> scores = random_scores(64, 4.0f, 2);
  const float exact = online(scores, 64).lse();
  for (const float offset : {-20.0f, -8.0f, 8.0f, 20.0f}) {
    Online row = online(scores, 64);
    row.state.rebase(row.state.reference + offset / kUnitLog2, kUnitLog2);
    EXPECT_NEAR(row.lse(), exact, 1e-5f);
  }
}

TEST(RowState, ARowThatSawNothing) {
  const FinishedRow nothing = RowState{}.total(-kInfinity, kUnit).finished();
  EXPECT_TRUE(nothing.saw_nothing());
  EXPECT_EQ(nothing.lse(kUnit), -kInfinity);
  EXPECT_EQ(RowState{}.total(-kInfinity, kUnit).normaliser, 0.0f);
  RowState state;
  EXPECT_EQ(state.rebase(5.0f, kUnitLog2), 0.0f);  // what was accumulated under −inf is nothing
  EXPECT_EQ(state.sum, 0.0f);
  EXPECT_EQ(state.rebase(5.0f, kUnitLog2), 1.0f);
}

TEST(RowState, ASinkIsOneMoreScoreOfValueZero) {
  for (const float spread : {0.1f, 3.0f, 40.0f}) {
    const std::vector<float> scores = random_scores(50, spread, 4);
    const float top = *std::max_element(scores.begin(), scores.end()) * kUnit;
    for (const float sink : {top - 150, top - 6, top, top + 6, top + 150}) {
      const double expected = lse_of(scores, sink);
      const Online row = online(scores, 7);
      const double out = row.out() * std::exp(lse_of(scores) - expected);
      EXPECT_NEAR(row.finish(sink).lse(kUnit), expected, 1e-5 * std::max(1.0, std::abs(expected)));
      EXPECT_NEAR(row.out(sink), out, 1e-4 * std::max(1.0, std::abs(out)));
    }
  }
}

TEST(RowState, ARowThatSawNothingHasTheSinkForLse) {
  for (const float sink : {-3e30f, -300.0f, 0.0f, 300.0f, 3e30f}) {
    const RowTotal row = RowState{}.total(sink, kUnit);
    EXPECT_FLOAT_EQ(row.finished().lse(kUnit), sink);
    EXPECT_EQ(row.normaliser, 0.0f);  // the sink has all weight
  }
}

/// Returns what a backward takes for the weight of `score`.
double weight(const FinishedRow& row, double score) {
  return std::exp2((score - row.reference) * kUnitLog2 - row.log2_sum);
}

TEST(FinishedRow, KeepsTheWeightsOfScoresOfAnySize) {
  for (const float top : {0.0f, -3e4f, 3e4f, 1e9f, -1e15f, 1e30f}) {
    const float next = std::nextafter(top, -kInfinity);
    const Online row = online({next, top, top}, 1);
    const double smaller = std::exp((double{next} - top) * kUnit);
    EXPECT_NEAR(weight(row.finish(), top), 1 / (2 + smaller), 1e-6) << top;
    EXPECT_NEAR(weight(row.finish(), next), smaller / (2 + smaller), 1e-6) << top;
    const float sink = top * kUnit;  // as near the scores as float32 allows
    const double of_sink = std::exp(double{sink} - double{top} * kUnit);
    const double share = 1 / (2 + smaller + of_sink);
    EXPECT_NEAR(weight(row.finish(sink), top), share, 1e-6) << top;
    EXPECT_NEAR(row.total(sink).normaliser, share, 1e-6) << top;
  }
}

TEST(FinishedRow, OfAnLseHasTheWeightsThatTheLseSays) {
  for (const float lse : {-1e6f, -70.0f, 0.0f, 0.3f, 1234.5f, 1e6f}) {
    const FinishedRow row = FinishedRow::of_lse(lse, kUnit);
    EXPECT_FLOAT_EQ(row.lse(kUnit), lse);
    for (const double below : {0.0, 0.5, 20.0}) {
      const double score = row.reference - below;
      EXPECT_NEAR(weight(row, score), std::exp(score * kUnit - lse), 1e-6);
    }
  }
  EXPECT_TRUE(FinishedRow::of_lse(-kInfinity, kUnit).saw_nothing());
}

TEST(FinishedRow, IsSteepFromWhereRoundingItsLseChangesWeights) {
  const auto row_at = [](float lse_log2) { return FinishedRow{lse_log2 / kUnitLog2, 0}; };
  EXPECT_FALSE(row_at(0.99f * kSteep).steep(kUnitLog2));
  EXPECT_TRUE(row_at(1.01f * kSteep).steep(kUnitLog2));
  EXPECT_TRUE(row_at(-1.01f * kSteep).steep(kUnitLog2));
  EXPECT_FALSE(FinishedRow{}.steep(kUnitLog2));
}

TEST(LessProduct, RoundsOnce) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 1000; ++i) {
    const float b = normal(generator), c = std::ldexp(normal(generator), i % 40);
    const float a = b * c + normal(generator);
    const double exact = a - double{b} * c;
    EXPECT_NEAR(less_product(a, b, c), exact, 1e-7 * std::abs(exact));
  }
}

TEST(Merge, SplittingAndMergingEqualsNotSplitting) {
  const std::vector<float> scores = random_scores(100, 5.0f, 3);
  const Online whole = online(scores, 7);
  for (std::size_t cut = 0; cut <= scores.size(); ++cut) {
    const Online a = online({scores.begin(), scores.begin() + cut}, 7);
    const Online b = online({scores.begin() + cut, scores.end()}, 7);
    const Merge merge = Merge::of(a.lse(), b.lse());
    EXPECT_NEAR(merge.lse, whole.lse(), 1e-5f) << "cut at " << cut;
    EXPECT_NEAR(merge.a * a.out() + merge.b * b.out(), whole.out(), 1e-4f) << "cut at " << cut;
  }
}

TEST(Merge, IsCommutativeAndAssociative) {
  const std::vector<float> lse = {-30.0f, -1.0f, 0.0f, 2.5f, 90.0f, -kInfinity};
  for (const float x : lse) {
    for (const float y : lse) {
      const Merge xy = Merge::of(x, y);
      const Merge yx = Merge::of(y, x);
      EXPECT_EQ(xy.lse, yx.lse);
      EXPECT_EQ(xy.a, yx.b);
      EXPECT_EQ(xy.b, yx.a);
      for (const float z : lse) {
        const float left = Merge::of(xy.lse, z).lse;
        const float right = Merge::of(x, Merge::of(y, z).lse).lse;
        if (left == right) continue;  // both may be −inf
        EXPECT_NEAR(left, right, 1e-5f * std::max(1.0f, std::abs(left)));
      }
    }
  }
}

TEST(Merge, WeightsAddUpToOne) {
  for (const float x : {-100.0f, -1.0f, 0.0f, 50.0f}) {
    for (const float y : {-100.0f, 0.5f, 80.0f}) {
      const Merge merge = Merge::of(x, y);
      EXPECT_FLOAT_EQ(merge.a + merge.b, 1.0f);
      EXPECT_GE(merge.lse, std::max(x, y));
    }
  }
}

TEST(Merge, EmptyPartsAreNeutral) {
  const Merge neither = Merge::of(-kInfinity, -kInfinity);
  EXPECT_EQ(neither.a, 0.0f);
  EXPECT_EQ(neither.b, 0.0f);
  EXPECT_EQ(neither.lse, -kInfinity);
  const Merge only_b = Merge::of(-kInfinity, 3.0f);
  EXPECT_EQ(only_b.a, 0.0f);
  EXPECT_EQ(only_b.b, 1.0f);
  EXPECT_EQ(only_b.lse, 3.0f);
}

}  // namespace
}  // namespace flashtile
