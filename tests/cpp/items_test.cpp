// These tests check that threads take every block of every head of every sequence once, the longest first.
#include "items.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <vector>

namespace flashtile::cpu {
namespace {

constexpr int kTile = 16;

int blocks_of(const Sequence& rows) {
  return Spans::tiles(rows.q.size, kTile);
}

/// This batch has sequences of `lengths` queries and as many keys, or, if it is dense, all of the first one's length.
struct Batch {
  Batch(const std::vector<int>& lengths, bool ragged, int heads_ = 3) : heads(heads_), begins{0} {
    for (const int length : lengths) begins.push_back(begins.back() + length);
    problem.ragged = ragged;
    problem.batch = static_cast<int>(lengths.size());
    problem.seqlen_q = problem.seqlen_k = ragged ? begins.back() : lengths.front();
    problem.band = Band::causal();
    if (ragged) tensors.cu_seqlens_q.data = tensors.cu_seqlens_k.data = begins.data();
    table.resize(static_cast<std::size_t>(Items::table_size(problem)));
  }

  Items items() { return {problem, entries_of(problem, &tensors), table.data(), heads, blocks_of}; }
  Items whole_heads() {
    return {problem, entries_of(problem, &tensors), table.data(), heads, [](const Sequence&) { return 1; }};
  }

  int heads;
  std::vector<int> begins;
  Problem problem;
  ForwardTensors tensors;
  std::vector<Items::Entry> table;
};

void expect_each_once(Batch batch) {
  const Items items = batch.items();
  std::set<std::tuple<int, int, int>> seen;
  for (std::int64_t i = 0; i < items.count(); ++i) {
    const Item item = items.at(i);
    const Sequence rows = entries_of(batch.problem, &batch.tensors).at(item.batch);
    EXPECT_EQ(item.blocks, blocks_of(rows));
    EXPECT_LT(item.block, item.blocks);
    EXPECT_LT(item.head, batch.heads);
    EXPECT_EQ(item.rows.q.first, rows.q.first);
    EXPECT_EQ(item.rows.k.used, rows.k.used);
    EXPECT_TRUE(seen.emplace(item.batch, item.head, item.block).second);
  }
  std::size_t all = 0;
  for (int b = 0; b < batch.problem.batch; ++b)
    all += static_cast<std::size_t>(batch.heads * blocks_of(entries_of(batch.problem, &batch.tensors).at(b)));
  EXPECT_EQ(seen.size(), all);
}

TEST(Items, AreEachBlockOnce) {
  expect_each_once({{40, 40, 40}, false});
  expect_each_once({{0, 0}, false});
  expect_each_once({{40, 0, 1, 16, 17, 0, 300, 0}, true});
  expect_each_once({{0, 0}, true});
}

TEST(Items, LongSequencesComeFirst) {
  Batch batch({40, 0, 1, 300, 17, 200, 40}, true);
  const Items items = batch.whole_heads();
  std::vector<int> lengths;
  for (std::int64_t i = 0; i < items.count(); ++i) lengths.push_back(items.at(i).rows.q.used);
  EXPECT_TRUE(std::is_sorted(lengths.rbegin(), lengths.rend()));
  EXPECT_EQ(items.at(6).batch, 0);  // equally long sequences keep their order
  EXPECT_EQ(items.at(9).batch, 6);
}

TEST(Items, StretchIsTheSameForEqualSequencesAndForADenseBatch) {
  for (const int batch : {1, 3, 8})
    for (const int heads : {1, 5})
      for (int threads = 1; threads <= 20; ++threads) {
        const std::vector<int> lengths(batch, 64);
        Batch dense(lengths, false, heads), ragged(lengths, true, heads);
        EXPECT_DOUBLE_EQ(ragged.whole_heads().stretch(threads), dense.whole_heads().stretch(threads));
      }
}

TEST(Items, StretchOfOneLongSequenceIsItsShare) {
  Batch batch({1000, 10, 10, 10, 10}, true, 1);
  EXPECT_DOUBLE_EQ(batch.whole_heads().stretch(1), 1);
  EXPECT_NEAR(batch.whole_heads().stretch(4), 4, 0.01);
  Batch none({0, 0}, true);
  EXPECT_EQ(none.whole_heads().stretch(4), 1);
}

TEST(Items, OfNoSequencesAreTheRowsOfAnEmptyOne) {
  Batch batch({}, true);
  batch.problem.seqlen_q = 40;
  const Items items = batch.items();
  ASSERT_EQ(items.count(), 9);
  EXPECT_EQ(items.at(0).rows.q.size, 40);
  EXPECT_EQ(items.at(0).rows.q.used, 0);
}

}  // namespace
}  // namespace flashtile::cpu
