// These tests check that Divisor, which multiplies instead of dividing, is exact for every dividend that int holds.
#include "flashtile/math/head_packing.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

namespace flashtile {
namespace {

constexpr int kMax = std::numeric_limits<int>::max();

/// Compares it to / and %, for dividends where the quotient changes, as far out as they go, and in between.
void expect_exact(int value, std::mt19937& random) {
  const Divisor divisor = Divisor(value);
  EXPECT_EQ(divisor.value, value);
  const auto expect = [&](int x) {
    ASSERT_EQ(divisor.quotient(x), x / value) << x << " / " << value;
    ASSERT_EQ(divisor.remainder(x), x % value) << x << " % " << value;
  };
  const auto expect_around = [&](std::int64_t multiple) {
    for (std::int64_t x = multiple - 1; x <= multiple + 1; ++x)
      if (x >= 0 && x <= kMax) expect(static_cast<int>(x));
  };
  const int most = kMax / value;
  for (const std::int64_t n : {0, 1, 2, 3, most / 2, most - 1, most}) expect_around(n * value);
  for (int run = 0; run < 30; ++run) {
    expect_around(std::int64_t{value} * static_cast<int>(random() % (most + 1u)));
    expect(static_cast<int>(random() >> 1));
  }
  expect(kMax);
}

TEST(Divisor, IsExactForSmallValues) {
  std::mt19937 random(1);
  for (int value = 1; value <= 5000; ++value) expect_exact(value, random);
}

TEST(Divisor, IsExactForLargeValues) {
  std::mt19937 random(2);
  for (int log2 = 12; log2 < 31; ++log2)
    for (int offset = -3; offset <= 3; ++offset) expect_exact((1 << log2) + offset, random);
  for (int offset = 0; offset < 5; ++offset) expect_exact(kMax - offset, random);
  for (int run = 0; run < 5000; ++run) expect_exact(1 + static_cast<int>(random() % kMax) / (1 << run % 20), random);
}

TEST(Divisor, IsExactForEveryDividendOfAFewBits) {
  for (const int value : {1, 2, 3, 5, 7, 12, 16, 132, 641, 1000})
    for (int x = 0; x < 1 << 18; ++x) ASSERT_EQ(Divisor(value).quotient(x), x / value) << x << " / " << value;
}

TEST(Divisor, OfNothingIsOne) {
  EXPECT_EQ(Divisor{}.quotient(kMax), kMax);
  EXPECT_EQ(Divisor{}.remainder(kMax), 0);
  EXPECT_EQ(Divisor(0).quotient(7), 7);
}

TEST(GroupPacking, EveryHeadOfEveryQueryIsOneRow) {
  for (const int group : {1, 2, 3, 4, 6, 7, 16, 71, 128}) {
    const GroupPacking packing{Divisor(group)};
    int row = 0;
    for (int query = 0; query < 40; ++query) {
      for (int head = 0; head < group; ++head, ++row) {
        ASSERT_EQ(packing.query(row), query) << "row " << row;
        ASSERT_EQ(packing.head(row), head) << "row " << row;
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
