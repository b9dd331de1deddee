// These tests check that each (query, head) is one row of packed heads, and that a tile holds the queries that it says.
#include "flashtile/math/head_packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

namespace flashtile {
namespace {

TEST(HeadPacking, EveryQueryOfEveryHeadIsOneRow) {
  for (int heads = 1; heads <= HeadPacking::kRows; ++heads) {
    const HeadPacking packing = HeadPacking::of(heads, heads);
    for (const int warps : {1, 3}) {
      const int rows = warps * HeadPacking::kRows;
      std::set<std::pair<int, int>> seen;
      for (int row = 0; row < rows; ++row) {
        if (packing.idle(row)) continue;
        ASSERT_LT(packing.query(0, row), packing.queries_of(rows));
        ASSERT_LT(packing.head(row), heads);
        ASSERT_TRUE(seen.emplace(packing.query(0, row), packing.head(row)).second) << "row " << row;
        ASSERT_EQ(packing.query(160, row), packing.queries_of(160) + packing.query(0, row));
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(packing.queries_of(rows) * heads)) << heads;
      EXPECT_EQ(packing.used_rows(rows), packing.queries_of(rows) * heads);
      EXPECT_EQ(packing.has_idle_rows(), packing.used_rows(rows) < rows);
    }
    EXPECT_GT(packing.used_rows(HeadPacking::kRows) + heads, HeadPacking::kRows) << "another query would fit";
    EXPECT_EQ(packing.first_head(3), 3 * heads);
  }
  EXPECT_EQ(HeadPacking{}, HeadPacking::of(1, 1));
}

TEST(HeadPacking, RowsOfAWarpStandInTheOrderOfTheTensor) {
  for (int heads = 1; heads <= HeadPacking::kRows; ++heads) {
    const HeadPacking packing = HeadPacking::of(heads, heads);
    for (int row = 0; row < packing.used_rows(HeadPacking::kRows); ++row) {
      EXPECT_EQ(packing.query(0, row) * heads + packing.head(row), row) << "TMA's boxes have no gap";
      EXPECT_FALSE(packing.idle(row));
    }
  }
}

TEST(HeadPacking, PacksHaveEveryHeadOfEachGroupAndNoOther) {
  for (const int group : {1, 2, 3, 7, 16, 17, 37, 51}) {
    for (int heads = 1; heads <= std::min(group, HeadPacking::kRows); ++heads) {
      const HeadPacking packing = HeadPacking::of(heads, group);
      constexpr int kGroups = 3;
      const int packs = packing.packs_of(kGroups * group), packs_of_group = packs / kGroups;
      EXPECT_EQ(packs_of_group, (group + heads - 1) / heads) << heads << " of " << group;
      std::set<int> seen;
      for (int pack = 0; pack < packs; ++pack) {
        const int first = packing.first_head(pack);
        ASSERT_EQ(first / group, pack / packs_of_group) << heads << " of " << group;
        ASSERT_EQ((first + heads - 1) / group, pack / packs_of_group) << heads << " of " << group;
        for (int head = first; head < first + heads; ++head) seen.insert(head);
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(kGroups * group)) << heads << " of " << group;
    }
  }
}

TEST(HeadPacking, QueriesAreThoseOfTheRows) {
  constexpr int kTile = 32;
  for (int heads = 1; heads <= HeadPacking::kRows; ++heads) {
    const HeadPacking packing = HeadPacking::of(heads, heads);
    for (const int seqlen : {1, 5, 40}) {
      for (int first = 0; packing.queries_of(first) < seqlen; first += kTile) {
        std::set<int> queries;
        for (int row = first; row < first + kTile; ++row)
          if (!packing.idle(row) && packing.query(0, row) < seqlen) queries.insert(packing.query(0, row));
        EXPECT_EQ(packing.queries(first, kTile, seqlen), (Range{*queries.begin(), *queries.rbegin() + 1}));
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
