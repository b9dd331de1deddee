// These tests check that each (query, head) is one row of packed heads, and that a tile holds the queries that it says.
#include "flashtile/math/head_packing.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace flashtile {
namespace {

TEST(HeadPacking, EveryQueryOfEveryHeadIsOneRow) {
  for (const int log2 : {0, 1, 2, 4}) {
    const HeadPacking packing{log2};
    for (const int seqlen : {1, 5, 40}) {
      std::set<std::pair<int, int>> seen;
      for (int row = 0; row < packing.rows(seqlen); ++row) {
        ASSERT_LT(packing.query(row), seqlen);
        ASSERT_LT(packing.head(row), packing.heads());
        ASSERT_TRUE(seen.emplace(packing.query(row), packing.head(row)).second) << "row " << row;
      }
      EXPECT_EQ(packing.query(packing.rows(seqlen)), seqlen);
      EXPECT_EQ(HeadPacking{}.query(seqlen), seqlen);
    }
    EXPECT_EQ(packing.first_head(3), 3 * packing.heads());
  }
}

TEST(HeadPacking, QueriesAreThoseOfTheRows) {
  constexpr int kTile = 16;
  for (const int log2 : {0, 1, 2, 4}) {
    const HeadPacking packing{log2};
    for (const int seqlen : {1, 5, 40}) {
      for (int first = 0; first < packing.rows(seqlen); first += kTile) {
        std::set<int> queries;
        for (int row = first; row < first + kTile; ++row)
          if (packing.query(row) < seqlen) queries.insert(packing.query(row));
        EXPECT_EQ(packing.queries(first, kTile, seqlen), (Range{*queries.begin(), *queries.rbegin() + 1}));
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
