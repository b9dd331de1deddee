// These tests check the laws of dropout: the published random numbers, one word for each element, the asked share of
// them.
#include "flashtile/math/dropout.h"

#include <gtest/gtest.h>

#include <set>

namespace flashtile {
namespace {

TEST(Philox, GivesThePublishedNumbers) {
  // These are known answers of the authors' Random123 library.
  const auto expect = [](Philox found, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    EXPECT_EQ(found.word[0], a);
    EXPECT_EQ(found.word[1], b);
    EXPECT_EQ(found.word[2], c);
    EXPECT_EQ(found.word[3], d);
  };
  expect(Philox::of(0, 0, 0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  expect(Philox::of(~0u, ~0u, ~0u, ~0u, ~std::uint64_t{0}), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  expect(Philox::of(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0x299f31d0a4093822), 0xd16cfe09, 0x94fdcceb,
         0x5001e420, 0x24126ea1);
}

TEST(Dropout, EveryElementHasAWordOfItsOwn) {
  const Dropout dropout = Dropout::of(0.5, 7);
  std::set<std::uint32_t> words;
  int elements = 0;
  for (int batch = 0; batch < 2; ++batch)
    for (int head = 0; head < 2; ++head)
      for (int row = 0; row < 32; ++row)
        for (int column = 0; column < 32; ++column, ++elements)
          words.insert(dropout.words(batch, head, row, column).word[(row >> 3 & 1) + 2 * (column >> 3 & 1)]);
  EXPECT_EQ(words.size(), std::size_t(elements));  // two of 4096 random words are equal once in 500 seeds
}

TEST(Dropout, DropsTheShareThatIsAsked) {
  for (const double p : {0.0, 1e-3, 0.1, 0.5, 0.9}) {
    const Dropout dropout = Dropout::of(p, 3);
    EXPECT_EQ(dropout.active(), p > 0);
    EXPECT_NEAR(dropout.scale, 1 / (1 - p), 1e-5);
    int kept = 0;
    constexpr int kSide = 512;
    for (int row = 0; row < kSide; ++row)
      for (int column = 0; column < kSide; ++column) kept += !dropout.active() || dropout.keeps(1, 2, row, column);
    const double n = kSide * kSide;
    EXPECT_NEAR(kept / n, 1 - p, 5 * std::sqrt(p * (1 - p) / n) + 1e-9);
  }
}

TEST(Dropout, OddsAreExactToTheWord) {
  EXPECT_EQ(Dropout::of(0x1p-33, 0).drop_below, 1u);  // it rounds to the nearest word, half up
  EXPECT_EQ(Dropout::of(0x1p-34, 0).drop_below, 0u);
  EXPECT_EQ(Dropout::of(0.25, 0).drop_below, 1u << 30);
  EXPECT_EQ(Dropout::of(1 - 0x1p-60, 0).drop_below, ~0u);  // some weights may always be left
}

}  // namespace
}  // namespace flashtile
