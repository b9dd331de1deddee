// These tests check that the parts of a block of keys visit what the whole block visits, in the same order.
#include "flashtile/scheduler/group_walk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "flashtile/mask/mask.h"

namespace flashtile {
namespace {

const std::vector<Band> kBands = {Band::full(), Band::causal(), {7, 2},
                                  {9, -4},      {-4, 9},        {Band::kUnbounded, -Band::kUnbounded}};

using Steps = std::vector<std::pair<int, int>>;  // (head, tile)

Steps steps_of(const GroupWalk& walk) {
  Steps steps;
  int head = walk.first_head, tile = walk.first_tile_of_head;
  for (int i = 0; i < walk.steps; ++i) {
    steps.emplace_back(head, tile);
    walk.advance_step(head, tile);
  }
  return steps;
}

/// Calls `visit(walk)` for walks of all masks: by heads with every first tile, and by tiles in both directions.
template <class Visit>
void for_each_walk(Visit&& visit) {
  constexpr int kM = 3, kN = 4;
  for (const Band band : kBands) {
    for (const Lengths n : {Lengths{0, 9}, Lengths{1, 1}, Lengths{14, 9}, Lengths{5, 20}, Lengths{20, 5}}) {
      for (int key = 0; key < n.k; key += kN) {
        const Range keys = {key, std::min(key + kN, n.k)};
        const BlockWalk queries = Mask{band.transposed()}.walk(keys, kM, n.transposed());
        visit(GroupWalk{.queries = queries, .start = queries.first(), .by_tiles = true, .direction = 1});
        visit(GroupWalk{.queries = queries, .start = queries.last(), .by_tiles = true, .direction = -1});
        if (queries.empty()) visit(GroupWalk{.queries = queries, .start = 0, .by_tiles = false});
        for (int start = queries.first(); start < queries.end(); ++start)
          visit(GroupWalk{.queries = queries, .start = start, .by_tiles = false});
      }
    }
  }
}

TEST(GroupWalk, VisitsEveryTileOfEveryHeadFromItsStartAround) {
  for_each_walk([](GroupWalk walk) {
    if (walk.by_tiles) return;
    constexpr int kHead = 6, kGroup = 3;
    walk.cut(kHead, kGroup, 0, Divisor(1), false);
    Steps expected;
    for (int head = kHead; head < kHead + kGroup; ++head) {
      int tile = walk.start;
      for (int i = 0; i < walk.queries.blocks(); ++i) {
        expected.emplace_back(head, tile);
        tile = walk.queries.next_around(tile, 1);
      }
    }
    ASSERT_EQ(steps_of(walk), expected);
  });
}

TEST(GroupWalk, ByTilesVisitsAllHeadsOfATileBeforeTheNext) {
  for_each_walk([](GroupWalk walk) {
    if (!walk.by_tiles) return;
    constexpr int kHead = 6, kGroup = 3;
    walk.cut(kHead, kGroup, 0, Divisor(1), false);
    Steps expected;
    for (int i = 0, tile = walk.start; i < walk.queries.blocks(); ++i, tile += walk.direction)
      for (int head = kHead; head < kHead + kGroup; ++head) expected.emplace_back(head, tile);
    ASSERT_EQ(steps_of(walk), expected);
  });
}

TEST(GroupWalk, PartsAreTheWholeWalkInOrder) {
  for_each_walk([](GroupWalk walk) {
    for (const int group : {0, 1, 2, 5}) {
      for (const bool whole_heads : {false, true}) {
        if (whole_heads && !walk.by_tiles) continue;
        walk.cut(group, group, 0, Divisor(1), whole_heads);
        Steps whole = steps_of(walk);
        // Parts of whole heads take their heads one part after the other.
        if (whole_heads) std::stable_sort(whole.begin(), whole.end(), [](auto a, auto b) { return a.first < b.first; });
        for (int parts = 1; parts <= static_cast<int>(whole.size()) + 2; ++parts) {
          const int unit = whole_heads ? walk.queries.blocks() : 1, units = whole_heads ? group : walk.steps;
          const int longest = (units + parts - 1) / parts * unit;
          Steps joined;
          for (int i = 0; i < parts; ++i) {
            GroupWalk part = walk;
            part.cut(group, group, i, Divisor(parts), whole_heads);
            ASSERT_LE(part.steps, longest);
            ASSERT_TRUE(!whole_heads || part.empty() || part.first_tile_of_head == walk.start);
            Steps steps = steps_of(part);
            if (whole_heads)
              std::stable_sort(steps.begin(), steps.end(), [](auto a, auto b) { return a.first < b.first; });
            joined.insert(joined.end(), steps.begin(), steps.end());
          }
          ASSERT_EQ(joined, whole);
        }
      }
    }
  });
}

// In a fixed order, a block of keys adds to a tile of dQ when the block before it has: that has to be a part that comes
// before it in the order in which thread blocks take them, and the same part of its block, which is about as far.
TEST(GroupWalk, WhoAddsToATileBeforeIsTheSamePartOfTheBlockBefore) {
  constexpr int kM = 3, kN = 4, kGroup = 5;
  for (const Band band : kBands) {
    for (const Lengths n : {Lengths{14, 9}, Lengths{5, 20}, Lengths{40, 33}}) {
      for (int parts = 1; parts < 12; ++parts) {
        std::vector<std::pair<std::pair<int, int>, int>> adds;  // a step, and the index of the part that takes it
        const int blocks = (n.k + kN - 1) / kN;
        for (int index = 0; index < blocks * parts; ++index) {
          const int key = index / parts * kN;
          GroupWalk part{.queries = Mask{band.transposed()}.walk({key, std::min(key + kN, n.k)}, kM, n.transposed())};
          part.start = part.queries.last();
          part.direction = -1;
          part.by_tiles = true;
          part.cut(0, kGroup, index % parts, Divisor(parts), band != Band::full());
          for (const auto& step : steps_of(part)) adds.emplace_back(step, index);
        }
        std::sort(adds.begin(), adds.end());
        for (std::size_t i = 1; i < adds.size(); ++i) {
          if (adds[i].first == adds[i - 1].first) {
            ASSERT_EQ(adds[i].second, adds[i - 1].second + parts);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
