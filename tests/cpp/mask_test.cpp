// The mask answers two questions: which elements are visible, and which blocks hold one. These tests check that the
// answers agree, and that walks visit the blocks they should.
#include "flashtile/mask/mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace flashtile {
namespace {

const std::vector<int> kDistances = {-Band::kUnbounded, -13, -4, -1, 0, 1, 2, 5, Band::kUnbounded};
constexpr int kLongest = 11;

/// Calls `visit(lengths, band)` for every combination of small lengths and distances, but for bands that end before
/// they begin: check makes one of them that shows nothing whatever the lengths, which is among these.
template <class Visit>
void for_each_mask(Visit&& visit) {
  for (int q = 0; q <= kLongest; ++q)
    for (int k = 0; k <= kLongest; ++k)
      for (const int left : kDistances)
        for (const int right : kDistances)
          if (left >= -right) visit(Lengths{q, k}, Band{left, right});
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

/// Returns what the elements say of the columns [block · width, (block + 1) · width), of which those behind the last
/// column are hidden.
BlockKind kind_by_elements(Range rows, int block, int width, Lengths n, Band band) {
  int kept = 0;
  for (int i = rows.begin; i < rows.end; ++i)
    for (int j = block * width; j < (block + 1) * width; ++j) kept += band.keep(i, j, n);
  if (kept == 0) return BlockKind::kSkip;
  return kept == (rows.end - rows.begin) * width ? BlockKind::kInterior : BlockKind::kEdge;
}

/// Calls `visit(rows, width)` for tiles of rows and widths of blocks of several sizes.
template <class Visit>
void for_each_tile(Lengths n, Visit&& visit) {
  for (const int tile_m : {1, 2, 3, 4, 8})
    for (const int width : {1, 2, 3, 4, 8})
      for (int row = 0; row < n.q; row += tile_m) visit(Range{row, std::min(row + tile_m, n.q)}, width);
}

std::string to_string(Range rows, int width, Lengths n, Band band) {
  std::ostringstream text;
  text << "rows " << rows.begin << ".." << rows.end << ", blocks of " << width << ", lengths " << n.q << ", " << n.k
       << ", band " << band.left << ", " << band.right;
  return text.str();
}

TEST(Mask, BlocksAreWhatTheElementsSay) {
  for_each_mask([](Lengths n, Band band) {
    for_each_tile(n, [&](Range rows, int width) {
      const BlockWalk walk = Mask{band}.walk(rows, width, n);
      const int blocks = (n.k + width - 1) / width;
      for (int b = -1; b <= blocks; ++b)
        ASSERT_EQ(walk.kind(b), kind_by_elements(rows, b, width, n, band))
            << "block " << b << ", " << to_string(rows, width, n, band);
    });
  });
}

TEST(Mask, AWalkVisitsEachBlockThatIsNotSkippedOnceInOrder) {
  for_each_mask([](Lengths n, Band band) {
    for_each_tile(n, [&](Range rows, int width) {
      const BlockWalk walk = Mask{band}.walk(rows, width, n);
      std::vector<int> expected, visited;
      for (int b = 0; b * width < n.k; ++b)
        if (kind_by_elements(rows, b, width, n, band) != BlockKind::kSkip) expected.push_back(b);
      for (int b = walk.first(); b < walk.end(); b = walk.next(b)) {
        visited.push_back(b);
        ASSERT_EQ(walk.is_edge(b), kind_by_elements(rows, b, width, n, band) == BlockKind::kEdge);
      }
      ASSERT_EQ(visited, expected) << to_string(rows, width, n, band);
      ASSERT_EQ(walk.blocks(), int(expected.size()));
      ASSERT_EQ(walk.empty(), expected.empty());
      if (expected.empty()) return;
      ASSERT_EQ(walk.first(), expected.front());
      ASSERT_EQ(walk.last(), expected.back());
    });
  });
}

TEST(Mask, AWalkOfNoRowsIsEmpty) {
  for (const Band band : {Band::full(), Band::causal(), Band{2, 3}}) {
    EXPECT_TRUE(Mask{band}.walk({4, 4}, 2, {8, 8}).empty());
    EXPECT_TRUE(Mask{band}.walk({4, 3}, 2, {8, 8}).empty());
    EXPECT_TRUE(Mask{band}.walk({0, 0}, 2, {0, 8}).empty());
    EXPECT_EQ((VisibleKeys<4>(Mask{band}, {0, 0}, {0, 8}).walk().blocks()), 0);
  }
}

// A backward kernel's blocks of keys begin with different tiles of queries and wrap around, in either direction.
TEST(Mask, AWalkAroundComesBackAfterEachBlockOnce) {
  for (int first = 0; first < 4; ++first) {
    for (int end = first + 1; end < 9; ++end) {
      const BlockWalk walk{{first, end}, {}};
      for (const int step : {1, -1}) {
        for (int start = first; start < end; ++start) {
          std::vector<bool> seen(end);
          int block = start;
          do {
            ASSERT_EQ(walk.kind(block), BlockKind::kEdge);
            ASSERT_FALSE(seen[block]);
            seen[block] = true;
            const int next = walk.next_around(block, step);
            ASSERT_EQ(walk.next_around(next, -step), block);
            block = next;
          } while (block != start);
          ASSERT_EQ(std::count(seen.begin(), seen.end(), true), walk.blocks());
        }
      }
    }
  }
}

TEST(Mask, SharersHaveEachBlockOnce) {
  for_each_mask([](Lengths n, Band band) {
    const Range rows{0, n.q};
    const BlockWalk walk = Mask{band}.walk(rows, 1, n);
    for (const int sharers : {1, 2, 3, 4}) {
      for (int sharer = 0; sharer < sharers; ++sharer) {
        const BlockWalk own = walk.share(sharer, sharers);
        for (int i = 0; i * sharers + sharer < n.k; ++i) ASSERT_EQ(own.kind(i), walk.kind(i * sharers + sharer));
        ASSERT_EQ(own.kind((n.k + sharers - 1) / sharers), BlockKind::kSkip);
      }
    }
  });
}

// Kernels begin their blocks at the first visible key. Each visible key lies in one block, at the place where the
// shorter problem has it.
TEST(Mask, VisibleKeysAreThoseOfTheElements) {
  constexpr int kN = 3;
  for_each_mask([](Lengths n, Band band) {
    for_each_tile(n, [&](Range rows, int) {
      const int first_visible = band.columns(rows.begin, n).begin;
      for (const int first : {first_visible, first_visible / kN * kN}) {
        const VisibleKeys<kN> keys(Mask{band}, rows, n, first);
        std::vector<bool> seen(n.k);
        for (int b = keys.walk().first(); b < keys.walk().end(); b = keys.walk().next(b)) {
          for (int j = 0; j < kN && b * kN + j < keys.count; ++j) {
            const int key = keys.key(b) + j;
            ASSERT_LT(key, n.k);
            seen[key] = true;
            for (int i = rows.begin; i < rows.end; ++i) {
              ASSERT_EQ(band.keep(i, b * kN + j, keys.lengths), band.keep(i, key, n));
              ASSERT_TRUE(keys.walk().is_edge(b) || band.keep(i, key, n));
            }
          }
          if (!keys.walk().is_edge(b)) {
            ASSERT_LE((b + 1) * kN, keys.count);
          }
        }
        for (int i = rows.begin; i < rows.end; ++i)
          for (int j = 0; j < n.k; ++j) ASSERT_TRUE(seen[j] || !band.keep(i, j, n)) << to_string(rows, kN, n, band);
      }
    });
  });
}

// Thread blocks that share a tile take neighbouring blocks, in the order of their keys.
TEST(Mask, PartsOfVisibleKeysHaveEachBlockOnce) {
  constexpr int kN = 3;
  for_each_mask([](Lengths n, Band band) {
    for_each_tile(n, [&](Range rows, int) {
      const VisibleKeys<kN> all(Mask{band}, rows, n);
      for (const int parts : {1, 2, 3, 5}) {
        int block = 0, keys = 0;
        for (int i = 0; i < parts; ++i) {
          VisibleKeys<kN> part = all;
          part.keep_part(i, parts);
          const BlockWalk walk = part.walk();
          ASSERT_EQ(walk.empty(), part.blocks == 0);
          for (int b = walk.first(); b < walk.end(); b = walk.next(b), ++block) {
            ASSERT_EQ(part.key(b), all.key(block));
            ASSERT_EQ(walk.kind(b), all.walk().kind(block));
            for (int j = 0; j < kN && b * kN + j < part.count; ++j, ++keys)
              for (int row = rows.begin; row < rows.end; ++row)
                ASSERT_EQ(band.keep(row, b * kN + j, part.lengths), band.keep(row, block * kN + j, all.lengths));
          }
        }
        ASSERT_EQ(block, all.blocks);
        ASSERT_EQ(keys, all.blocks == 0 ? 0 : all.count);
      }
    });
  });
}

// With ALiBi a tile begins at its diagonal, and comes back to the first block after the last.
TEST(Mask, VisitsFromTheDiagonalHaveEachBlockOnce) {
  constexpr int kN = 3;
  for_each_mask([](Lengths n, Band band) {
    for_each_tile(n, [&](Range rows, int) {
      VisibleKeys<kN> keys(Mask{band}, rows, n);
      for (int step = 0; step < keys.blocks; ++step) ASSERT_EQ(keys.visited(step), step);
      const int row = rows.begin, diagonal = keys.lengths.diagonal(row);
      keys.begin_at_diagonal(row);
      std::vector<bool> seen(keys.blocks);
      for (int step = 0; step < keys.blocks; ++step) {
        ASSERT_FALSE(seen[keys.visited(step)]);
        seen[keys.visited(step)] = true;
      }
      if (diagonal >= 0 && diagonal < keys.blocks * kN) {
        ASSERT_EQ(keys.visited(0), diagonal / kN);
      }
    });
  });
}

// This law lets a kernel start at the first key that its rows see, as if there were none before it.
TEST(Mask, KeysBeforeTheFirstVisibleOneMayBeDropped) {
  for_each_mask([](Lengths n, Band band) {
    for (int row = 0; row < n.q; ++row) {
      const int first = band.columns(row, n).begin;
      const Lengths rest{n.q, n.k - first};
      for (int i = row; i < n.q; ++i) {
        for (int j = 0; j < std::min(first, n.k); ++j) ASSERT_FALSE(band.keep(i, j, n));
        for (int j = first; j < n.k; ++j) ASSERT_EQ(band.keep(i, j - first, rest), band.keep(i, j, n));
      }
    }
  });
}

TEST(Mask, InteriorIsAPartOfVisible) {
  for_each_mask([](Lengths n, Band band) {
    for (int row = 0; row < n.q; ++row) {
      const BlockWalk walk = Mask{band}.walk({row, n.q}, 4, n);
      ASSERT_GE(walk.interior.begin, walk.visible.begin);
      ASSERT_LE(walk.interior.end, std::max(walk.visible.begin, walk.visible.end));
    }
  });
}

TEST(Mask, TransposedSeesTheSamePairs) {
  for_each_mask([](Lengths n, Band band) {
    for (int i = 0; i < n.q; ++i)
      for (int j = 0; j < n.k; ++j)
        ASSERT_EQ(Mask{band}.columns(i, n).contains(j), Mask{band}.transposed().columns(j, n.transposed()).contains(i));
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
            const BlockWalk from_rows = Mask{band}.walk(rows, tile_n, n);
            const BlockWalk from_columns = Mask{band}.transposed().walk(columns, tile_m, n.transposed());
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

// Parts of a sequence that lie elsewhere meet under the same band with its diagonal moved: this is what a chunk of
// queries sees of a chunk of keys before it, or behind it.
TEST(Mask, ChunksOfASequenceSeeWhatTheWholeDoes) {
  constexpr int kRows = 12;
  const Lengths whole{kRows, kRows};
  for (const Band band : {Band::causal(), Band{3, 0}, Band{2, 4}, Band{-1, 5}})
    for (int row = 0; row < kRows; ++row)
      for (int row_end = row + 1; row_end <= kRows; ++row_end)
        for (int key = 0; key < kRows; ++key)
          for (int key_end = key + 1; key_end <= kRows; ++key_end) {
            const Lengths n{row_end - row, key_end - key};
            // In the chunk, query i meets key i + n.k - n.q on the diagonal; in the sequence, row + i - key.
            const int behind = key_end - row_end;
            const auto moved = [](int side, int by) { return side == Band::kUnbounded ? side : side + by; };
            const Band of_chunk{moved(band.left, behind), moved(band.right, -behind)};
            for (int i = 0; i < n.q; ++i)
              for (int j = 0; j < n.k; ++j) ASSERT_EQ(of_chunk.keep(i, j, n), band.keep(row + i, key + j, whole));
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
    for (const int left : {-Band::kUnbounded, -kMost, -1, 0, 1, kMost, Band::kUnbounded}) {
      for (const int right : {-Band::kUnbounded, -kMost, -1, 0, 1, kMost, Band::kUnbounded}) {
        if (left < -right) continue;
        for (const int row : {0, n.q / 2, n.q - 1}) {
          const std::int64_t diagonal = std::int64_t{row} + n.k - n.q;
          const std::int64_t begin = std::max<std::int64_t>(0, diagonal - left);
          const std::int64_t end = std::min<std::int64_t>(n.k, diagonal + right + 1);
          const Range columns = Band{left, right}.columns(row, n);
          ASSERT_EQ(columns.begin, begin);
          ASSERT_EQ(columns.end, end);
          const BlockWalk walk = Mask{{left, right}}.walk({row, row + 1}, kTile, n);
          ASSERT_EQ(walk.empty(), end <= begin);
          const VisibleKeys<kTile> keys(Mask{{left, right}}, {row, row + 1}, n);
          ASSERT_EQ(keys.blocks, end <= begin ? 0 : (end - begin + kTile - 1) / kTile);
          if (end <= begin) continue;
          ASSERT_EQ(walk.first(), begin / kTile);
          ASSERT_EQ(walk.end(), (end + kTile - 1) / kTile);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
