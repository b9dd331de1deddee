// These tests check the laws of dropout: the published random numbers, a byte of its own for each element, the asked
// share of them, and that no two places go together.
#include "flashtile/math/dropout.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>

namespace flashtile {
namespace {

using Words = std::array<std::uint32_t, 4>;

template <int kRounds>
Words philox(Words const& c, std::uint64_t key) {
  const Philox found = Philox::of<kRounds>(c[0], c[1], c[2], c[3], key);
  return {found.word[0], found.word[1], found.word[2], found.word[3]};
}

TEST(Philox, GivesThePublishedNumbers) {
  // These are known answers of the authors' Random123 library.
  const Words zero{}, ones{~0u, ~0u, ~0u, ~0u}, pi{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  constexpr std::uint64_t kOfPi = 0x299f31d0a4093822;
  EXPECT_EQ(philox<7>(zero, 0), (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(philox<7>(ones, ~std::uint64_t{0}), (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(philox<7>(pi, kOfPi), (Words{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
  EXPECT_EQ(philox<10>(zero, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox<10>(ones, ~std::uint64_t{0}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox<10>(pi, kOfPi), (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Dropout, EveryElementHasAByteOfItsOwn) {
  const Dropout dropout = Dropout::of(0.5, 7);
  std::map<Words, std::set<int>> bytes;  // those taken of each Philox
  int elements = 0;
  for (int batch = 0; batch < 2; ++batch)
    for (int head = 0; head < 2; ++head)
      for (int row = 0; row < 32; ++row)
        for (int column = 0; column < 32; ++column, ++elements) {
          const Philox words = dropout.words(batch, head, row, column);
          const int byte = 4 * Dropout::word_of(row, column) + Dropout::byte_of(row, column);
          EXPECT_TRUE(byte >= 0 && byte < 16);
          const bool is_new = bytes[{words.word[0], words.word[1], words.word[2], words.word[3]}].insert(byte).second;
          EXPECT_TRUE(is_new);
        }
  EXPECT_EQ(bytes.size(), std::size_t(elements / 16));
}

TEST(Dropout, ThoseThatShareWordsDifferInTwoBitsOfEachPlace) {
  const Dropout dropout = Dropout::of(0.5, 7);
  const auto first = [&](int row, int column) { return dropout.words(0, 0, row, column).word[0]; };
  for (int row = 0; row < 32; ++row)
    for (int column = 0; column < 32; ++column)
      EXPECT_EQ(first(row, column) == first(2, 16), (row & ~9) == 2 && (column & ~9) == 16);
}

TEST(Dropout, EveryByteIsComparedWithTheNumber) {
  for (std::uint32_t number = 0; number < 256; ++number) {
    const BytesAtLeast at_least(number);
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      // What a byte says does not depend on the others, even where these are least or greatest.
      for (const std::uint32_t others : {0x00000000u, 0xffffffffu, 0x807f00ffu, 0x7f80ff00u}) {
        for (int place = 0; place < 32; place += 8) {
          const std::uint32_t word = (others & ~(0xffu << place)) | byte << place;
          ASSERT_EQ(at_least(word) >> place & 0x80, byte >= number ? 0x80u : 0u) << number << " " << byte;
        }
      }
    }
  }
}

TEST(Dropout, DropsTheShareThatIsAsked) {
  for (const double p : {0.0, 1e-3, 0.1, 0.5, 0.9, 0.999}) {
    const Dropout dropout = Dropout::of(p, 3);
    EXPECT_EQ(dropout.active(), p > 0);
    const double rounded = dropout.drop_below / 256.0;
    EXPECT_NEAR(rounded, p, p > 0 && (p < 1.0 / 512 || p > 511.0 / 512) ? 1.0 / 256 : 1.0 / 512);
    EXPECT_FLOAT_EQ(dropout.scale, 1 / (1 - rounded));
    constexpr int kSide = 512;
    const double n = kSide * kSide / 16, deviation = std::sqrt(rounded * (1 - rounded));
    int kept[16] = {};  // of each byte, since a wrong one would hide among the others
    for (int row = 0; row < kSide; ++row)
      for (int column = 0; column < kSide; ++column)
        kept[4 * Dropout::word_of(row, column) + Dropout::byte_of(row, column)] +=
            !dropout.active() || dropout.keeps(1, 2, row, column);
    int all = 0;
    for (const int of_byte : kept) {
      EXPECT_NEAR(of_byte / n, 1 - rounded, 5 * deviation / std::sqrt(n) + 1e-9);
      all += of_byte;
    }
    EXPECT_NEAR(all / (16 * n), 1 - rounded, 5 * deviation / std::sqrt(16 * n) + 1e-9);
  }
}

TEST(Dropout, NoTwoPlacesGoTogether) {
  // Of two independent elements both are kept with (1 − p)², whether they share words or not. Pairs that have an
  // element in common nearly double the variance.
  const Dropout dropout = Dropout::of(0.25, 5), other_seed = Dropout::of(0.25, 6);
  constexpr int kSide = 256;
  const double n = kSide * kSide, both = 0.75 * 0.75, bound = 5 * std::sqrt(2 * both * (1 - both) / n);
  const auto expect_independent = [&](Dropout const& other, int batch, int head, int rows, int columns) {
    int kept = 0;
    for (int row = 0; row < kSide; ++row)
      for (int column = 0; column < kSide; ++column)
        kept += dropout.keeps(1, 2, row, column) && other.keeps(1 + batch, 2 + head, row + rows, column + columns);
    EXPECT_NEAR(kept / n, both, bound) << batch << " " << head << " " << rows << " " << columns;
  };
  for (const int rows : {0, 1, 2, 7, 8, 9, 16, 64})
    for (const int columns : {0, 1, 2, 7, 8, 9, 16, 64})
      if (rows || columns) expect_independent(dropout, 0, 0, rows, columns);
  expect_independent(dropout, 1, 0, 0, 0);
  expect_independent(dropout, 0, 1, 0, 0);
  expect_independent(other_seed, 0, 0, 0, 0);
}

TEST(Dropout, OddsAreMultiplesOfABytes) {
  EXPECT_EQ(Dropout::of(0, 1), Dropout{});
  EXPECT_EQ(Dropout::of(0.25, 0).drop_below, 64u);
  EXPECT_EQ(Dropout::of(0.1, 0).drop_below, 26u);
  EXPECT_EQ(Dropout::of(1.5 / 256, 0).drop_below, 2u);      // it rounds to the nearest multiple, half up
  EXPECT_EQ(Dropout::of(0x1p-60, 0).drop_below, 1u);        // what is asked for drops some
  EXPECT_EQ(Dropout::of(1 - 0x1p-50, 0).drop_below, 255u);  // some weights may always be left
  EXPECT_EQ(Dropout::of(1 - 0x1p-50, 0).scale, 256.0f);
}

TEST(Dropout, TilesBeginWhereWordsAreWhole) {
  const Dropout dropout = Dropout::of(0.5, 1);
  for (const int column : {0, 1, 15, 16, 17, 1000}) {
    EXPECT_EQ(dropout.tile_begin(column) % 16, 0);
    EXPECT_TRUE(dropout.tile_begin(column) <= column && column < dropout.tile_begin(column) + 16);
    EXPECT_EQ(Dropout{}.tile_begin(column), column);
  }
}

}  // namespace
}  // namespace flashtile
