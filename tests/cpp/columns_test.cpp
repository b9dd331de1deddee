// A column mask hides rows from columns. These tests ask every element of small masks, and compare what blocks are said
// to hold.
#include "flashtile/mask/columns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "flashtile/mask_words.h"

namespace flashtile {
namespace {

bool hidden_by_definition(const HiddenRows& h, int row) {
  return (h.first.begin <= row && row < h.first.end) || (h.second.begin <= row && row < h.second.end);
}

TEST(HiddenRows, AgreeWithTheirElements) {
  constexpr int kRows = 5;
  for (int a = -1; a <= kRows; ++a)
    for (int b = -1; b <= kRows + 1; ++b)
      for (int c = -1; c <= kRows; ++c)
        for (int d = -1; d <= kRows + 1; ++d) {
          const HiddenRows hidden{{a, b}, {c, d}};
          for (int begin = 0; begin < kRows; ++begin)
            for (int end = begin + 1; end <= kRows; ++end) {
              int count = 0;
              for (int row = begin; row < end; ++row) {
                ASSERT_EQ(hidden.hides(row), hidden_by_definition(hidden, row));
                count += hidden.hides(row);
              }
              ASSERT_EQ(hidden.hides_all({begin, end}), count == end - begin) << a << b << c << d << begin << end;
              ASSERT_EQ(hidden.hides_any({begin, end}), count > 0) << a << b << c << d << begin << end;
            }
        }
}

TEST(HiddenRows, TakeAnyValue) {
  constexpr int kLeast = std::numeric_limits<int>::min(), kMost = std::numeric_limits<int>::max();
  EXPECT_TRUE((HiddenRows{{kLeast, kMost}, {0, 0}}.hides_all({0, 1 << 30})));
  EXPECT_FALSE((HiddenRows{{kMost, kLeast}, {5, 3}}.hides_any({0, 1 << 30})));
  EXPECT_TRUE((HiddenRows{{kLeast, 7}, {7, kMost}}.hides_all({0, 1 << 30})));
}

/// Blocks of a random mask have the kind that their elements say, under every band. Where bounds are certain of a kind,
/// it is this one. They are of most blocks of one kind, and of most edges of a mask alone.
TEST(Columns, KindsOfBlocksAgreeWithTheElements) {
  std::mt19937 random(0);
  std::int64_t certain_edges = 0, edges = 0, certain = 0, of_one_kind = 0;
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 3000; ++trial) {
    const Lengths n{1 + below(12), 1 + below(12)};
    const int distances[] = {0, 1, 3, Band::kUnbounded, -1, -4};
    Band band{distances[below(6)], distances[below(6)]};
    if (band.left < -band.right) band = {Band::kUnbounded, -Band::kUnbounded};  // as check does
    std::vector<HiddenRows> columns(static_cast<std::size_t>(n.k));
    for (HiddenRows& hidden : columns) {
      const auto range = [&] {
        const int begin = below(n.q + 1);
        return below(3) == 0 ? Range{} : Range{begin, begin + below(n.q + 2 - begin)};
      };
      hidden = {range(), range()};
    }
    for (int begin = 0; begin < n.q; ++begin)
      for (int end = begin + 1; end <= n.q; ++end)
        for (int first = 0; first < n.k; ++first)
          for (int last = first + 1; last <= n.k; ++last) {
            int kept = 0;
            for (int i = begin; i < end; ++i)
              for (int j = first; j < last; ++j)
                kept += band.keep(i, j, n) && !hidden_by_definition(columns[static_cast<std::size_t>(j)], i);
            const BlockKind expected = kept == 0                                ? BlockKind::kSkip
                                       : kept == (end - begin) * (last - first) ? BlockKind::kInterior
                                                                                : BlockKind::kEdge;
            ASSERT_EQ(kind_of_block(columns.data() + first, {first, last}, {begin, end}, band, n), expected);
            HiddenBounds bounds;
            for (int j = first; j < last; ++j) bounds.add(columns[static_cast<std::size_t>(j)]);
            const KindByBounds bounded = kind_by_bounds(bounds, {first, last}, {begin, end}, band, n);
            ASSERT_TRUE(!bounded.certain || bounded.kind == expected);
            if (expected != BlockKind::kEdge)
              certain += bounded.certain, ++of_one_kind;
            else if (band == Band::full())  // one that cuts a tile leaves all of its columns open
              certain_edges += bounded.certain, ++edges;
          }
  }
  EXPECT_GT(certain, of_one_kind * 3 / 4);
  EXPECT_GT(certain_edges, edges * 2 / 3);
}

/// Bounds leave few questions open, which take most of the time of the kernel that finds the words: of documents, only
/// blocks that hold an end of one, and of keys that are evicted in any order, next to none.
TEST(Columns, BoundsAreCertainOfMostBlocks) {
  constexpr int kRows = 4000, kTile = 128;
  std::mt19937 random(0);
  const auto uncertain_of = [&](const std::vector<HiddenRows>& columns) {
    std::vector<int> uncertain(kRows / kTile + 1);  // tiles, for each block
    for (int first = 0; first < kRows; first += kTile) {
      const Range block{first, std::min(first + kTile, kRows)};
      HiddenBounds bounds;
      for (int j = block.begin; j < block.end; ++j) bounds.add(columns[static_cast<std::size_t>(j)]);
      for (int begin = 0; begin < kRows; begin += kTile) {
        const Range rows{begin, std::min(begin + kTile, kRows)};
        uncertain[static_cast<std::size_t>(first / kTile)] +=
            !kind_by_bounds(bounds, block, rows, Band::full(), {kRows, kRows}).certain;
      }
    }
    return uncertain;
  };
  const int ends[] = {700, 701, 1408, 3000, kRows};
  std::vector<HiddenRows> documents, causal_documents, evicted;
  for (int begin = 0; const int end : ends)
    for (const int start = begin; begin < end; ++begin) {
      documents.push_back({{0, start}, {end, kRows}});
      causal_documents.push_back({{0, begin}, {end, kRows}});
      evicted.push_back({{0, begin}, {begin + 1 + static_cast<int>(random() % (kRows - begin)), kRows}});
    }
  for (const auto& columns : {documents, causal_documents}) {
    const std::vector<int> uncertain = uncertain_of(columns);
    for (int block = 0; block <= kRows / kTile; ++block) {
      const bool holds_end = std::ranges::any_of(ends, [&](int end) { return end / kTile == block && end < kRows; });
      EXPECT_LE(uncertain[static_cast<std::size_t>(block)], holds_end ? 3 : 0) << block;
    }
  }
  for (const int of_block : uncertain_of(evicted)) EXPECT_LE(of_block, 1);
}

/// Columns are counted from the end, of a whole sequence and of any part that ends with it.
TEST(LastColumns, EndWithTheSequence) {
  std::vector<HiddenRows> ranges;
  for (int i = 0; i < 2 * 3 * 5; ++i) ranges.push_back({{i, i + 1}, {}});
  for (int count = 0; count <= 5; ++count) {
    const LastColumns masked{{ranges.data(), 3 * 5, 5, Divisor(2)}, count};
    for (int columns = 0; columns <= 12; ++columns) {
      ASSERT_EQ(masked.first(columns), std::max(columns - count, 0));
      const HiddenRows* const own = masked.of_mask(1, masked.ranges.mask_of(5), columns);
      for (int column = masked.first(columns); column < columns; ++column)
        ASSERT_TRUE(own[column - masked.first(columns)].hides(15 + 2 * 5 + count - (columns - column)));
    }
  }
}

/// A walk by the words of a tile goes once to each block that they have: last to those at an edge, or around.
TEST(MaskWords, StepsVisitEachBlockOnce) {
  std::mt19937 random(1);
  for (int count = 1; count <= 4; ++count)
    for (int trial = 0; trial < 200; ++trial) {
      std::vector<std::uint32_t> words(static_cast<std::size_t>(2 * count));
      std::vector<int> edges, interiors;
      for (int block = 0; block < 32 * count; ++block) {
        const unsigned kind = random() % (trial % 2 == 0 ? 3 : 40);
        if (kind > 1) continue;
        words[kind * static_cast<std::size_t>(count) + static_cast<std::size_t>(block) / 32] |= 1u << block % 32;
        (kind == 0 ? interiors : edges).push_back(block);
      }
      const MaskWords of_count{.words = count};
      const BlockWalk walk = of_count.steps(words.data());
      MaskedBlocks blocks{words.data()};
      std::vector<int> visited;
      for (int step = walk.first(); step < walk.end(); step = walk.next(step)) {
        visited.push_back(blocks.next(count));
        const std::vector<int>& kind = walk.is_edge(step) ? edges : interiors;
        ASSERT_TRUE(std::ranges::find(kind, visited.back()) != kind.end());
      }
      interiors.insert(interiors.end(), edges.begin(), edges.end());
      ASSERT_EQ(visited, interiors);
      for (int block = 0; block <= 32 * count; ++block)
        ASSERT_EQ(of_count.visited_before(words.data(), block),
                  std::ranges::count_if(visited, [&](int other) { return other < block; }));
      ASSERT_EQ(of_count.count(words.data()), std::ssize(visited));
      for (int block = 0; block < 32 * count; ++block)
        ASSERT_EQ(of_count.visits(words.data(), block), std::ranges::find(visited, block) != visited.end());

      // Around, from any block on.
      std::ranges::sort(visited);
      for (int from = 0; from < 32 * count && !visited.empty(); ++from) {
        const auto first = std::ranges::lower_bound(visited, from);
        std::ranges::rotate(visited, first == visited.end() ? visited.begin() : first);
        ASSERT_EQ(of_count.first_around(words.data(), from), visited.front());
        MaskedBlocksAround around(words.data(), count, visited.front());
        for (const int block : visited) {
          const auto [index, edge] = around.next(words.data(), count);
          ASSERT_EQ(index, block);
          ASSERT_EQ(edge, std::ranges::find(edges, block) != edges.end());
        }
        std::ranges::sort(visited);
      }
    }
}

TEST(ColumnRanges, FindThoseOfAHead) {
  std::vector<HiddenRows> memory(2 * 3 * 5);
  TensorView view;
  view.data = memory.data();
  view.rank = 4;
  view.shape = {2, 3, 5, 4};
  view.strides = {60, 20, 4, 1};
  const ColumnRanges of_each = ColumnRanges::of(view, 6);
  EXPECT_EQ(of_each.of_mask(1, of_each.mask_of(5), {0, 5, 5}), memory.data() + 25);
  EXPECT_EQ(of_each.of_mask(0, of_each.mask_of(1), {2, 3, 3}), memory.data() + 2);
  view.shape[0] = 1;
  EXPECT_EQ(ColumnRanges::of(view, 6).of_mask(1, 2, {0, 5, 5}), memory.data() + 10);  // entries share their masks
  EXPECT_FALSE(ColumnRanges::of({}, 6).given());
}

}  // namespace
}  // namespace flashtile
