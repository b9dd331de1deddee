// These tests check that every scheduler visits every tile exactly once.
#include "../../cpp/select/balance.h"
#include "flashtile/scheduler/persistent.h"
#include "flashtile/scheduler/ragged.h"
#include "flashtile/scheduler/sections.h"
#include "flashtile/scheduler/single.h"
#include "flashtile/scheduler/tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace flashtile {
namespace {

TEST(SingleTileScheduler, CoversEveryTileOnce) {
  for (const int batch : {1, 2, 5}) {
    for (const int heads : {1, 3, 8}) {
      for (const int m_blocks : {1, 2, 7}) {
        const SingleTileScheduler scheduler{.heads = heads, .m_blocks = m_blocks};
        std::set<std::tuple<int, int, int>> seen;
        const unsigned tiles = static_cast<unsigned>(batch * heads * m_blocks);
        for (unsigned index = 0; index < tiles; ++index) {
          const TileCoord coord = scheduler.tile(index);
          ASSERT_TRUE(0 <= coord.batch && coord.batch < batch);
          ASSERT_TRUE(0 <= coord.head && coord.head < heads);
          ASSERT_TRUE(0 <= coord.m_block && coord.m_block < m_blocks);
          ASSERT_TRUE(seen.emplace(coord.batch, coord.head, coord.m_block).second) << "tile " << index << " again";
        }
        EXPECT_EQ(seen.size(), tiles);
      }
    }
  }
}

// The persistent kernel, the lists of ragged tiles and the backward's blocks of keys all go by this order.
TEST(BlockOfSection, HasEachBlockOnceRankByRank) {
  for (const int heads : {1, 3, 8}) {
    for (const int blocks : {1, 2, 7}) {
      for (const int heads_at_once : {1, 2, 3, 8}) {
        std::set<std::pair<int, int>> seen;
        BlockOfSection last{0, 0, 0};
        for (int index = 0; index < heads * blocks; ++index) {
          const auto block = BlockOfSection::at(static_cast<unsigned>(index), heads, blocks, heads_at_once);
          ASSERT_EQ(block.section, block.head / heads_at_once);
          ASSERT_TRUE(0 <= block.head && block.head < heads);
          ASSERT_TRUE(0 <= block.rank && block.rank < blocks);
          ASSERT_TRUE(seen.emplace(block.head, block.rank).second) << "block " << index << " again";
          ASSERT_LE((std::tuple{last.section, last.rank, last.head}),
                    (std::tuple{block.section, block.rank, block.head}));
          last = block;
        }
      }
    }
  }
}

// Under a column mask, so do the dense batches.
TEST(BlockOfSection, InPartsHasEachBlockOnceAndTheLastRanksAtTheEnd) {
  for (const int heads : {1, 3, 8})
    for (const int blocks : {1, 2, 7, 64, 129})
      for (const int heads_at_once : {1, 2, 3, 8}) {
        std::set<std::pair<int, int>> seen;
        for (int index = 0; index < heads * blocks; ++index) {
          const auto block = BlockOfSection::in_parts(static_cast<unsigned>(index), heads, blocks, heads_at_once);
          ASSERT_TRUE(0 <= block.head && block.head < heads);
          ASSERT_TRUE(0 <= block.rank && block.rank < blocks);
          ASSERT_TRUE(seen.emplace(block.head, block.rank).second) << "block " << index << " again";
          ASSERT_EQ(block.rank < blocks - blocks / 3, index < heads * (blocks - blocks / 3));
        }
      }
}

TEST(SingleTileScheduler, ReachesTheLastTileOfTheLargestGrid) {
  constexpr unsigned kTiles = (1u << 31) - 1;  // select refuses more
  const SingleTileScheduler scheduler{.heads = 1, .m_blocks = 1};
  EXPECT_EQ(scheduler.tile(kTiles - 1).batch, static_cast<int>(kTiles - 1));
  const SingleTileScheduler many_heads{.heads = 70000, .m_blocks = 3};
  const TileCoord last = many_heads.tile(70000u * 3 * 2 - 1);
  EXPECT_EQ(last.batch, 1);
  EXPECT_EQ(last.head, 69999);
  EXPECT_EQ(last.m_block, 0);  // within a head the last block comes first
}

PersistentScheduler divided(int batch, int heads, int m_blocks, int heads_at_once, int blocks) {
  PersistentScheduler scheduler{.heads = heads,
                                .m_blocks = m_blocks,
                                .batch_heads = batch * heads,
                                .heads_at_once = std::min(heads_at_once, batch * heads),
                                .blocks = blocks};
  std::vector<int> cost(static_cast<std::size_t>(m_blocks));
  std::iota(cost.begin(), cost.end(), 2);
  divide(scheduler, cost);
  return scheduler;
}

void expect_same(TileCoord found, TileCoord expected) {
  EXPECT_EQ(found.batch, expected.batch);
  EXPECT_EQ(found.head, expected.head);
  EXPECT_EQ(found.m_block, expected.m_block);
}

TEST(PersistentScheduler, CoversEveryTileOnce) {
  for (const int batch : {1, 3})
    for (const int heads : {1, 5, 8})
      for (const int m_blocks : {1, 2, 7, 32})
        for (const int heads_at_once : {1, 2, 4, batch * heads})
          for (const int blocks : {1, 7, 132, 144}) {
            const PersistentScheduler scheduler = divided(batch, heads, m_blocks, heads_at_once, blocks);
            std::set<std::tuple<int, int, int>> seen;
            for (int block = 0; block < blocks; ++block)
              for (int n = 0; n < scheduler.tiles_of(block); ++n) {
                const unsigned index = scheduler.index(n, block);
                ASSERT_LT(index, scheduler.tiles());
                const TileCoord coord = scheduler.tile(index);
                ASSERT_TRUE(0 <= coord.batch && coord.batch < batch);
                ASSERT_TRUE(0 <= coord.head && coord.head < heads);
                ASSERT_TRUE(0 <= coord.m_block && coord.m_block < m_blocks);
                expect_same(TileOrder::of(scheduler).tile(index), coord);
                ASSERT_TRUE(seen.emplace(coord.batch, coord.head, coord.m_block).second) << "tile " << index;
              }
            EXPECT_EQ(seen.size(), scheduler.tiles());
          }
}

TEST(PersistentScheduler, EndsEveryBlockWithItsShortestTiles) {
  const PersistentScheduler scheduler = divided(3, 8, 32, 4, 132);
  for (int block = 0; block < scheduler.blocks; ++block)
    for (int n = scheduler.rounds + 1; n < scheduler.tiles_of(block); ++n)
      EXPECT_LE(scheduler.tile(scheduler.index(n, block)).m_block,
                scheduler.tile(scheduler.index(n - 1, block)).m_block);
}

TEST(PersistentScheduler, DividesTheLastTilesEvenly) {
  // With 4096 tiles on 132 blocks, rounds alone would give some blocks 32 tiles and some 31, 3 % from even.
  PersistentScheduler scheduler{.heads = 32, .m_blocks = 4, .batch_heads = 1024, .heads_at_once = 8, .blocks = 132};
  EXPECT_GT(divide(scheduler, std::vector{2, 3, 4, 5}), 0.985);
}

TEST(PersistentScheduler, ReachesTheLastTileOfTheLargestProblem) {
  constexpr int kTiles = (1u << 31) - 1;  // select refuses more
  const PersistentScheduler scheduler = divided(kTiles, 1, 1, 1, 132);
  unsigned tiles = 0, last = 0;
  for (int block = 0; block < scheduler.blocks; ++block) {
    tiles += static_cast<unsigned>(scheduler.tiles_of(block));
    last = std::max(last, scheduler.index(scheduler.tiles_of(block) - 1, block));
  }
  EXPECT_EQ(tiles, unsigned{kTiles});
  EXPECT_EQ(last, kTiles - 1u);
  EXPECT_EQ(scheduler.tile(last).batch, kTiles - 1);
  expect_same(TileOrder::of(scheduler).tile(last), scheduler.tile(last));
}

TEST(PersistentScheduler, HasNothingToDoWithoutTiles) {
  const PersistentScheduler scheduler = divided(0, 4, 3, 1, 0);
  EXPECT_EQ(scheduler.tiles(), 0u);
  EXPECT_EQ(scheduler.tiles_of(0), 0);
}

/// This is a list as order_tiles writes it: `parts` are (sequence, its blocks, first block of the part, blocks of the
/// part).
struct RaggedList {
  std::vector<RaggedEntry> entries;
  int counts[2] = {0, 0};

  RaggedList(std::vector<std::array<int, 4>> const& parts, int heads_at_once) {
    for (const auto& [batch, all, first_block, blocks] : parts) {
      const int first = static_cast<int>(entries.size());
      for (int i = 0; i < blocks; ++i) entries.push_back({{first, batch, first_block, blocks, heads_at_once}, all, {}});
    }
    counts[0] = static_cast<int>(entries.size());
  }
  RaggedTiles tiles() { return {entries.data(), counts, counts + 1}; }
};

TEST(RaggedTiles, FindsEveryTileOnce) {
  for (const int heads : {1, 2, 5, 16}) {
    for (const int heads_at_once : {1, 2, 3, 16}) {
      if (heads_at_once > heads) continue;
      RaggedList list({{2, 9, 3, 6}, {0, 4, 2, 2}, {2, 9, 1, 2}, {5, 1, 0, 1}, {0, 4, 0, 2}, {2, 9, 0, 1}},
                      heads_at_once);
      for (const bool last_first : {false, true}) {
        std::set<std::tuple<int, int, int>> seen;
        const unsigned tiles = static_cast<unsigned>(heads * list.counts[0]);
        RaggedTile tile;
        for (unsigned index = 0; index < tiles; ++index) {
          ASSERT_TRUE(list.tiles().find(index, heads, last_first, tile));
          ASSERT_TRUE(0 <= tile.head && tile.head < heads);
          ASSERT_TRUE(0 <= tile.block && tile.block < tile.entry->blocks_of_sequence);
          ASSERT_TRUE(seen.emplace(tile.entry->batch, tile.head, tile.block).second) << "tile " << index << " again";
        }
        EXPECT_EQ(seen.size(), tiles);
        for (const unsigned index : {tiles, tiles + 1, 2 * tiles, ~0u})
          EXPECT_FALSE(list.tiles().find(index, heads, last_first, tile)) << index;
      }
    }
  }
}

TEST(RaggedTiles, TakesHeadsOfASectionSideBySideFromTheMostWorkOn) {
  RaggedList list({{0, 3, 0, 3}}, 2);
  std::vector<std::pair<int, int>> order;
  RaggedTile tile;
  for (unsigned index = 0; list.tiles().find(index, 3, true, tile); ++index) order.emplace_back(tile.head, tile.block);
  const std::vector<std::pair<int, int>> expected = {{0, 2}, {1, 2}, {0, 1}, {1, 1}, {0, 0},
                                                     {1, 0}, {2, 2}, {2, 1}, {2, 0}};
  EXPECT_EQ(order, expected);
}

}  // namespace
}  // namespace flashtile
