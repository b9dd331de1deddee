// The mask answers two questions: which elements are visible, and which tiles hold one. These tests check that the
// answers agree.
#include "flashtile/mask/band.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace flashtile {
namespace {

const std::vector<int> kDistances = {0, 1, 2, 5, Band::kUnbounded};
constexpr int kLongest = 11;

/// Calls `visit(lengths, band)` for every combination of small lengths and distances.
template <class Visit>
void for_each_mask(Visit&& visit) {
  for (int q = 0; q <= kLongest; ++q)
    for (int k = 0; k <= kLongest; ++k)
      for (const int left : kDistances)
        for (const int right : kDistances) visit(Lengths{q, k}, Band{left, right});
}

/// This is the contract's own formula: −left ≤ j − (i + S_k − S_q) ≤ right.
bool visible_by_contract(int i, int j, Lengths n, Band band) {
  const std::int64_t distance = std::int64_t{j} - (std::int64_t{i} + n.k - n.q);
  return (band.left == Band::kUnbounded || -std::int64_t{band.left} <= distance) &&
         (band.right == Band::kUnbounded || distance <= band.right);
}

TEST(Mask, KeepAndColumnsFollowTheContract) {
  for_each_mask([](Lengths n, Band band) {
    for (int i = 0; i < n.q; ++i) {
      for (int j = 0; j < n.k; ++j) {
        ASSERT_EQ(band.keep(i, j, n), visible_by_contract(i, j, n, band));
        ASSERT_EQ(band.columns(i, n).contains(j), band.keep(i, j, n));
      }
      ASSERT_FALSE(band.keep(i, -1, n));
      ASSERT_FALSE(band.keep(i, n.k, n));
    }
  });
}

TEST(Mask, TilesHoldWhatTheElementsSay) {
  for_each_mask([](Lengths n, Band band) {
    for (const int tile_m : {1, 2, 3, 4, 8}) {
      for (const int tile_n : {1, 2, 3, 4, 8}) {
        for (int row = 0; row < n.q; row += tile_m) {
          const Range rows{row, std::min(row + tile_m, n.q)};
          const TileRanges tiles = band.tiles(rows, tile_n, n);
          for (int t = 0; t * tile_n < n.k; ++t) {
            int kept = 0;
            for (int i = rows.begin; i < rows.end; ++i)
              for (int j = t * tile_n; j < (t + 1) * tile_n; ++j) kept += band.keep(i, j, n);
            const bool whole = kept == (rows.end - rows.begin) * tile_n;
            ASSERT_EQ(tiles.visible.contains(t), kept > 0)
                << "rows " << rows.begin << ".." << rows.end << ", tile " << t << " of " << tile_n << ", lengths "
                << n.q << ", " << n.k << ", band " << band.left << ", " << band.right;
            ASSERT_EQ(tiles.interior.contains(t), whole)
                << "rows " << rows.begin << ".." << rows.end << ", tile " << t << " of " << tile_n << ", lengths "
                << n.q << ", " << n.k << ", band " << band.left << ", " << band.right;
          }
          ASSERT_GE(tiles.visible.begin, 0);
          ASSERT_LE(tiles.visible.end, (n.k + tile_n - 1) / tile_n);
        }
      }
    }
  });
}

// This law lets a kernel start at the first key that its rows see, as if there were none before it.
TEST(Mask, KeysBeforeTheFirstVisibleOneMayBeDropped) {
  for_each_mask([](Lengths n, Band band) {
    for (int row = 0; row < n.q; ++row) {
      const int first = band.columns(row, n).begin;
      const Lengths rest{n.q, n.k - first};
      for (int i = row; i < n.q; ++i) {
        for (int j = 0; j < first; ++j) ASSERT_FALSE(band.keep(i, j, n));
        for (int j = first; j < n.k; ++j) ASSERT_EQ(band.keep(i, j - first, rest), band.keep(i, j, n));
      }
    }
  });
}

TEST(Mask, InteriorIsAPartOfVisible) {
  for_each_mask([](Lengths n, Band band) {
    for (int row = 0; row < n.q; ++row) {
      const TileRanges tiles = band.tiles({row, n.q}, 4, n);
      ASSERT_GE(tiles.interior.begin, tiles.visible.begin);
      ASSERT_LE(tiles.interior.end, std::max(tiles.visible.begin, tiles.visible.end));
    }
  });
}

TEST(Mask, TransposedSeesTheSamePairs) {
  for_each_mask([](Lengths n, Band band) {
    for (int i = 0; i < n.q; ++i)
      for (int j = 0; j < n.k; ++j) ASSERT_EQ(band.keep(i, j, n), band.transposed().keep(j, i, n.transposed()));
  });
}

// In a deterministic backward, query tiles wait for the key tiles that they see: neither may see more than the other.
TEST(Mask, TilesSeeEachOther) {
  for_each_mask([](Lengths n, Band band) {
    for (const int tile_m : {1, 2, 3, 4, 8})
      for (const int tile_n : {1, 2, 3, 4, 8})
        for (int m = 0; m * tile_m < n.q; ++m)
          for (int t = 0; t * tile_n < n.k; ++t) {
            const Range rows{m * tile_m, std::min((m + 1) * tile_m, n.q)};
            const Range columns{t * tile_n, std::min((t + 1) * tile_n, n.k)};
            const TileRanges from_rows = band.tiles(rows, tile_n, n);
            const TileRanges from_columns = band.transposed().tiles(columns, tile_m, n.transposed());
            ASSERT_EQ(from_rows.visible.contains(t), from_columns.visible.contains(m))
                << "tile " << m << " of " << tile_m << " rows, tile " << t << " of " << tile_n << ", lengths " << n.q
                << ", " << n.k << ", band " << band.left << ", " << band.right;
          }
  });
}

TEST(Mask, IntersectionKeepsWhatBothKeep) {
  for_each_mask([](Lengths n, Band band) {
    const Band both = band.intersect(Band::causal());
    for (int i = 0; i < n.q; ++i)
      for (int j = 0; j < n.k; ++j) ASSERT_EQ(both.keep(i, j, n), band.keep(i, j, n) && Band::causal().keep(i, j, n));
  });
}

TEST(Mask, AWindowWideEnoughIsNone) {
  for (int q = 1; q <= kLongest; ++q)
    for (int k = 1; k <= kLongest; ++k)
      for (int i = 0; i < q; ++i) {
        const Lengths n{q, k};
        ASSERT_EQ((Band{k + q, k + q}.columns(i, n)), Band::full().columns(i, n));
        ASSERT_EQ((Band{k + q, 0}.columns(i, n)), Band::causal().columns(i, n));
      }
}

TEST(Mask, CausalMeetsTheBottomRightCorner) {
  const Band causal = Band::causal();
  EXPECT_EQ(causal.columns(0, {1, 7}), (Range{0, 7}));  // a decoded token sees everything
  EXPECT_EQ(causal.columns(2, {3, 5}), (Range{0, 5}));  // so does the last row of any problem
  EXPECT_EQ(causal.columns(0, {3, 5}), (Range{0, 3}));
  EXPECT_TRUE(causal.columns(1, {5, 3}).empty());  // with more rows than keys, the first rows see nothing
  EXPECT_EQ(causal.columns(2, {5, 3}), (Range{0, 1}));
}

TEST(Mask, TheLargestLengthsDoNotOverflow) {
  constexpr int kMost = (1 << 30) - 1;
  constexpr int kTile = 128;
  for (const Lengths n : {Lengths{kMost, kMost}, Lengths{1, kMost}, Lengths{kMost, 1}}) {
    for (const int left : {0, 1, kMost, Band::kUnbounded}) {
      for (const int right : {0, 1, kMost, Band::kUnbounded}) {
        for (const int row : {0, n.q / 2, n.q - 1}) {
          const std::int64_t diagonal = std::int64_t{row} + n.k - n.q;
          const std::int64_t begin = std::max<std::int64_t>(0, diagonal - left);
          const std::int64_t end = std::min<std::int64_t>(n.k, diagonal + right + 1);
          const Range columns = Band{left, right}.columns(row, n);
          ASSERT_EQ(columns.begin, begin);
          ASSERT_EQ(columns.end, end);
          const TileRanges tiles = Band{left, right}.tiles({row, row + 1}, kTile, n);
          ASSERT_EQ(tiles.visible.empty(), end <= begin);
          if (end <= begin) continue;
          ASSERT_EQ(tiles.visible.begin, begin / kTile);
          ASSERT_EQ(tiles.visible.end, (end + kTile - 1) / kTile);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
