// These tests compare ScoreMap to the contract's formula in double precision.
#include "flashtile/math/softmax.h"

#include <gtest/gtest.h>

#include <cmath>

namespace flashtile {
namespace {

/// Returns a score in log2 units, as every kernel reads the map.
double apply_log2(const ScoreMap& map, float raw) {
  double score = map.capped ? std::tanh(double{map.inner} * raw) : raw;
  if (map.stretched) score *= map.outer;
  return score * map.unit_log2;
}

double expected_log2(double scale, double softcap, double raw) {
  const double score = softcap > 0 ? softcap * std::tanh(raw * scale / softcap) : raw * scale;
  return score / std::log(2.0);
}

TEST(ScoreMap, IsTheContract) {
  for (const float scale : {0.125f, 1.0f, -0.5f, 0.0f, 1e-30f, 3e38f}) {
    for (const float softcap : {0.0f, 1e-30f, 1.0f, 30.0f, 1e5f, 1e20f, 1e36f, 3e38f}) {
      for (const bool alibi : {false, true}) {
        const ScoreMap map = ScoreMap::of(scale, softcap, alibi);
        for (const float raw : {-300.0f, -7.0f, 0.0f, 0.25f, 12.0f, 1000.0f, 1e-38f, 1e-30f}) {
          const double expected = expected_log2(scale, softcap, raw);
          // No float32 score is near a bound of 2^122 without being near the end of float32 itself.
          if (std::abs(expected) > (softcap > 0x1p122f ? 1e30 : 3e38)) continue;
          EXPECT_NEAR(apply_log2(map, raw), expected, 1e-7 + 3e-7 * std::abs(expected))
              << "scale " << scale << ", softcap " << softcap << ", raw " << raw;
        }
      }
    }
  }
}

TEST(ScoreMap, NumbersStayFinite) {
  for (const float scale : {1e-45f, 1.0f, -3.4e38f, 3.4e38f}) {
    for (const float softcap : {0.0f, 1e-45f, 1e-40f, 2.4e38f, 3.4e38f}) {
      const ScoreMap map = ScoreMap::of(scale, softcap, false);
      EXPECT_TRUE(std::isfinite(map.inner) && std::isfinite(map.outer) && std::isfinite(map.unit_log2));
    }
  }
}

TEST(ScoreMap, MapsNothingWhereTheUnitSaysIt) {
  EXPECT_FALSE(ScoreMap::of(0.1f, 0, false).maps());
  EXPECT_TRUE(ScoreMap::of(0.1f, 0, true).stretched);
  EXPECT_TRUE(ScoreMap::of(0.1f, 5, false).capped);
  EXPECT_FALSE(ScoreMap::of(0.1f, 5, false).stretched);
}

// Near 0 a kernel forms the softcap's tanh from a polynomial: as exactly as from exponentials.
TEST(ScoreMap, TanhNearZeroIsTanh) {
  for (const float scale : {1.0f, 0.125f, -0.3f, 0.0625f}) {
    for (const float softcap : {0.5f, 15.0f, 30.0f, 50.0f, 512.0f}) {
      const ScoreMap map = ScoreMap::of(scale, softcap, false);
      const bool further = softcap < ScoreMap::kSmallSoftcap;
      ASSERT_EQ(map.near, (further ? ScoreMap::kFurther : ScoreMap::kNear) / std::fabs(map.inner));
      ASSERT_EQ(map.three_near_terms(), !further);
      double most = 0;
      for (int i = -1000; i <= 1000; ++i) {
        const float raw = map.near * static_cast<float>(i) / 1000;
        float score[1] = {raw};
        map.tanh_near(score);
        most = std::max(most, std::fabs(double{score[0]} - std::tanh(double{map.inner} * raw)));
      }
      EXPECT_LE(most, 6e-8) << scale << " " << softcap;
    }
  }
  for (const float scale : {0.0f, 1e-9f, 1e7f, 3e38f}) EXPECT_EQ(ScoreMap::of(scale, 30, false).near, 0) << scale;
  EXPECT_EQ(ScoreMap::of(1, 0, false).near, 0) << "nothing is capped";
}

TEST(ScoreMap, ItsUnitIsPositive) {
  for (const float scale : {-0.1f, 0.0f, 0.1f, 3e38f}) {
    EXPECT_GT(ScoreMap::of(scale, 0, false).unit_log2, 0);
    EXPECT_GT(ScoreMap::of(scale, 5, true).unit_log2, 0);
  }
  EXPECT_TRUE(ScoreMap::of(-0.1f, 0, false).stretched);
  EXPECT_TRUE(ScoreMap::of(0.0f, 0, false).stretched);
}

}  // namespace
}  // namespace flashtile
