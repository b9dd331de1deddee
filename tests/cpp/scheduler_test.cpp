// Every scheduler visits every tile exactly once.
#include "flashtile/scheduler/single.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace flashtile
