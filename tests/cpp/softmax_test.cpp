// ScoreMap against the contract's formula in double precision.
#include "flashtile/math/softmax.h"

#include <gtest/gtest.h>

#include <cmath>

namespace flashtile {
namespace {

/// As every kernel reads it.
float apply(const ScoreMap& map, float raw) {
  return map.capped() ? map.outer_log2 * std::tanh(map.inner * raw) : map.outer_log2 * raw;
}

TEST(ScoreMap, IsTheContractInTheLog2Domain) {
  for (const double scale : {0.125, 1.0, -0.5, 0.0}) {
    for (const double softcap : {0.0, 1.0, 30.0}) {
      const ScoreMap map = ScoreMap::of(static_cast<float>(scale), static_cast<float>(softcap));
      EXPECT_EQ(map.capped(), softcap > 0 && scale != 0);
      for (const double raw : {-300.0, -7.0, 0.0, 0.25, 12.0, 1000.0}) {
        const double logit = softcap > 0 ? softcap * std::tanh(raw * scale / softcap) : raw * scale;
        const double expected = logit / std::log(2.0);
        EXPECT_NEAR(apply(map, static_cast<float>(raw)), expected, 2e-6 * std::max(1.0, std::abs(expected)));
      }
    }
  }
}

TEST(ScoreMap, KnowsWhetherItKeepsOrder) {
  EXPECT_TRUE(ScoreMap::of(0.1f, 0).order_preserving());
  EXPECT_FALSE(ScoreMap::of(-0.1f, 0).order_preserving());
  EXPECT_FALSE(ScoreMap::of(0.0f, 0).order_preserving());
  EXPECT_FALSE(ScoreMap::of(0.1f, 5).order_preserving());
}

}  // namespace
}  // namespace flashtile
