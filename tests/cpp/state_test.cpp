// Laws of the softmax state: however the keys are split, and in whatever order the parts meet, the result is one.
#include "flashtile/math/state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace flashtile {
namespace {

std::vector<float> random_scores_log2(int count, float spread, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> scores(static_cast<std::size_t>(count));
  for (float& score : scores) score = normal(generator);
  return scores;
}

double lse_of(const std::vector<float>& scores_log2) {
  double top = -INFINITY;
  for (const float s : scores_log2) top = std::max(top, double{s});
  double sum = 0;
  for (const float s : scores_log2) sum += std::exp2(s - top);
  return scores_log2.empty() ? -INFINITY : (top + std::log2(sum)) * std::log(2.0);
}

/// Online softmax: blocks of `block` scores, each with the running maximum as reference. `value` is Σ weight · score.
struct Online {
  RowState state;
  float value = 0;

  void add(const float* scores, int count) {
    const float top = *std::max_element(scores, scores + count);
    value *= state.rebase(std::max(state.reference_log2, top));
    for (int i = 0; i < count; ++i) {
      const float weight = std::exp2(scores[i] - state.reference_log2);
      state.sum += weight;
      value += weight * scores[i];
    }
  }
  float out() const { return value * state.normaliser(); }
};

Online online(const std::vector<float>& scores, int block) {
  Online result;
  const int count = static_cast<int>(scores.size());
  for (int i = 0; i < count; i += block) result.add(scores.data() + i, std::min(block, count - i));
  return result;
}

TEST(RowState, BlocksOfAnySizeGiveTheSameRow) {
  for (const float spread : {0.1f, 3.0f, 40.0f}) {
    const std::vector<float> scores = random_scores_log2(200, spread, 1);
    const double expected = lse_of(scores);
    const float out = online(scores, 200).out();
    for (const int block : {1, 3, 64, 199, 200}) {
      const Online result = online(scores, block);
      EXPECT_NEAR(result.state.lse(), expected, 1e-5 * std::max(1.0, std::abs(expected)));
      EXPECT_NEAR(result.out(), out, 1e-4f * std::max(1.0f, std::abs(out)));
    }
  }
}

TEST(RowState, AnyReferenceNearTheMaximumGivesTheSameRow) {
  const std::vector<float> scores = random_scores_log2(64, 4.0f, 2);
  const float exact = online(scores, 64).state.lse();
  for (const float offset : {-20.0f, -8.0f, 8.0f, 20.0f}) {
    RowState state = online(scores, 64).state;
    state.rebase(state.reference_log2 + offset);
    EXPECT_NEAR(state.lse(), exact, 1e-5f);
  }
}

TEST(RowState, ARowThatSawNothing) {
  const RowState nothing;
  EXPECT_EQ(nothing.lse(), -kInfinity);
  EXPECT_EQ(nothing.normaliser(), 0.0f);
  RowState state;
  EXPECT_EQ(state.rebase(5.0f), 0.0f);  // what was accumulated under −inf is nothing
  EXPECT_EQ(state.sum, 0.0f);
  EXPECT_EQ(state.rebase(5.0f), 1.0f);
}

TEST(RowState, AWeightThatJoinsIsOneMoreScoreOfValueZero) {
  for (const float spread : {0.1f, 3.0f, 40.0f}) {
    const std::vector<float> scores = random_scores_log2(50, spread, 4);
    const float top = *std::max_element(scores.begin(), scores.end());
    for (const float sink : {top - 200, top - 9, top, top + 9, top + 200}) {
      std::vector<float> with_sink = scores;
      with_sink.push_back(sink);
      const double expected = lse_of(with_sink);
      Online row = online(scores, 7);
      const double out = row.out() * std::exp(lse_of(scores) - expected);
      row.value *= row.state.join(sink);
      EXPECT_NEAR(row.state.lse(), expected, 1e-5 * std::max(1.0, std::abs(expected)));
      EXPECT_NEAR(row.out(), out, 1e-4 * std::max(1.0, std::abs(out)));
    }
  }
}

TEST(RowState, JoiningMayComeBeforeTheScores) {
  const std::vector<float> scores = random_scores_log2(50, 5.0f, 5);
  Online before, after = online(scores, 8);
  before.state.join(2.0f);
  before.add(scores.data(), 50);
  after.value *= after.state.join(2.0f);
  EXPECT_NEAR(before.state.lse(), after.state.lse(), 1e-5f);
  EXPECT_NEAR(before.out(), after.out(), 1e-4f);
}

TEST(RowState, ASinkOfMinusInfinityIsNone) {
  RowState state = online(random_scores_log2(9, 1.0f, 6), 9).state;
  const RowState same = state;
  EXPECT_EQ(state.join(-kInfinity), 1.0f);
  EXPECT_EQ(state.reference_log2, same.reference_log2);
  EXPECT_EQ(state.sum, same.sum);
  RowState nothing;
  EXPECT_EQ(nothing.join(-kInfinity), 1.0f);
  EXPECT_EQ(nothing.lse(), -kInfinity);
}

TEST(RowState, ARowThatSawNothingHasTheSinkForLse) {
  for (const float sink : {-300.0f, 0.0f, 300.0f}) {
    RowState nothing;
    EXPECT_EQ(nothing.join(sink), 0.0f);
    EXPECT_EQ(nothing.lse(), sink * kLn2);
    EXPECT_EQ(nothing.normaliser(), 1.0f);
  }
}

TEST(Merge, SplittingAndMergingEqualsNotSplitting) {
  const std::vector<float> scores = random_scores_log2(100, 5.0f, 3);
  const Online whole = online(scores, 7);
  for (std::size_t cut = 0; cut <= scores.size(); ++cut) {
    const Online a = online({scores.begin(), scores.begin() + cut}, 7);
    const Online b = online({scores.begin() + cut, scores.end()}, 7);
    const Merge merge = Merge::of(a.state.lse(), b.state.lse());
    EXPECT_NEAR(merge.lse, whole.state.lse(), 1e-5f) << "cut at " << cut;
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
        if (left == right) continue;  // also where both are −inf
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
