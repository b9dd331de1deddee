// Every scheduler visits every tile exactly once.
#include "flashtile/scheduler/persistent.h"
#include "flashtile/scheduler/single.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

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

TEST(SingleTileScheduler, ReachesTheLastTileOfTheLargestGrid) {
  constexpr unsigned kTiles = (1u << 31) - 1;  // select refuses more
  const SingleTileScheduler scheduler{.heads = 1, .m_blocks = 1};
  EXPECT_EQ(scheduler.tile(kTiles - 1).batch, static_cast<int>(kTiles - 1));
  const SingleTileScheduler many_heads{.heads = 70000, .m_blocks = 3};
  const TileCoord last = many_heads.tile(70000u * 3 * 2 - 1);
  EXPECT_EQ(last.batch, 1);
  EXPECT_EQ(last.head, 69999);
  EXPECT_EQ(last.m_block, 0);  // the order within a head is from the end
}

TEST(PersistentScheduler, CoversEveryTileOnce) {
  for (const int batch : {1, 3})
    for (const int heads : {1, 5, 8})
      for (const int m_blocks : {1, 2, 7, 32})
        for (const int heads_at_once : {1, 2, 4, batch * heads})
          for (const unsigned blocks : {1u, 7u, 132u}) {
            const PersistentScheduler scheduler{heads, m_blocks, batch * heads, std::min(heads_at_once, batch * heads)};
            std::set<std::tuple<int, int, int>> seen;
            for (unsigned round = 0; round < scheduler.rounds(blocks); ++round)
              for (unsigned block = 0; block < blocks; ++block) {
                const unsigned index = scheduler.index(round, block, blocks);
                if (index >= scheduler.tiles()) {
                  ASSERT_EQ(round + 1, scheduler.rounds(blocks));
                  continue;
                }
                const TileCoord coord = scheduler.tile(index);
                ASSERT_TRUE(0 <= coord.batch && coord.batch < batch);
                ASSERT_TRUE(0 <= coord.head && coord.head < heads);
                ASSERT_TRUE(0 <= coord.m_block && coord.m_block < m_blocks);
                ASSERT_TRUE(seen.emplace(coord.batch, coord.head, coord.m_block).second) << "tile " << index;
              }
            EXPECT_EQ(seen.size(), scheduler.tiles());
          }
}

TEST(PersistentScheduler, ReachesTheLastTileOfTheLargestProblem) {
  constexpr int kTiles = (1u << 31) - 1;  // select refuses more
  const PersistentScheduler scheduler{1, 1, kTiles, 1};
  const unsigned rounds = scheduler.rounds(132);
  EXPECT_EQ(rounds, kTiles / 132 + 1u);
  EXPECT_GE(scheduler.index(rounds - 1, 0, 132), (rounds - 1) * 132);
  EXPECT_EQ(scheduler.tile(scheduler.tiles() - 1).batch, kTiles - 1);
}

}  // namespace
}  // namespace flashtile
