// These tests check how the keys of tiles are divided into items, and items among teams (see SplitKeys): every visible
// key is in one item, and every item has one team.
#include "flashtile/scheduler/split_keys.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace flashtile {
namespace {

constexpr int kMin = std::numeric_limits<int>::min(), kMax = std::numeric_limits<int>::max();

/// These are the tables of a batch, and what is asked of it.
struct Case {
  int batch = 1, seqlen_q = 1, capacity = 100, added = 0, group = 1;
  Band band;
  std::vector<int> held, skipped, begins;  // begins is empty where the batch is dense
  bool appends_ragged = false;

  SplitKeys schedule() const {
    const int* const table = begins.empty() ? nullptr : begins.data();
    return {.queries = {batch, seqlen_q, table},
            .rows = {batch, capacity, held.data(), skipped.empty() ? nullptr : skipped.data(), added,
                     appends_ragged ? table : nullptr},
            .mask = {band},
            .packing = {Divisor(group)},
            .teams = {}};
  }
};

int pick(std::mt19937& random, std::initializer_list<int> of) {
  return of.begin()[random() % of.size()];
}

int below(std::mt19937& random, int end) {
  return static_cast<int>(random() % static_cast<unsigned>(end));
}

/// Returns every kind of batch: dense and ragged, with empty sequences, an unused tail, and padding; with `garbage`,
/// its tables hold anything.
Case random_case(std::mt19937& random, bool garbage) {
  Case c;
  c.batch = below(random, 6);
  c.capacity = pick(random, {0, 1, 63, 64, 700, 2500});
  c.group = pick(random, {1, 3, 4, 16});
  const int side = pick(random, {0, 1, 40, 300});
  const int moved = below(random, side + 1);
  const Band bands[] = {Band::full(),
                        Band::causal(),
                        {side, 0},
                        {0, side},
                        {side, below(random, 70)},
                        {side, -moved},
                        {-moved, side},
                        {Band::kUnbounded, -moved},
                        {-moved, Band::kUnbounded},
                        {Band::kUnbounded, -Band::kUnbounded}};
  c.band = bands[random() % std::size(bands)];
  const bool ragged = c.batch == 0 || random() % 2 == 0;
  c.seqlen_q = pick(random, {0, 1, 2, 7, 40, 130});
  if (random() % 2 == 0) c.added = below(random, 20);
  const auto entry = [&](int legal, int size) {
    return garbage ? pick(random, {kMin, kMax, -1, 0, legal, size, size + 1}) : legal;
  };
  if (ragged) {
    for (int b = 0; b <= c.batch; ++b) c.begins.push_back(below(random, c.seqlen_q + 1));
    std::ranges::sort(c.begins);  // neighbours may be equal, and rows after the last are unused
    for (int& begin : c.begins) begin = entry(begin, c.seqlen_q);
    c.appends_ragged = random() % 2 == 0;
    if (c.appends_ragged) c.added = c.seqlen_q;
  }
  for (int b = 0; b < c.batch; ++b) c.held.push_back(entry(below(random, c.capacity + 1), c.capacity));
  if (random() % 2 == 0)
    for (int b = 0; b < c.batch; ++b) c.skipped.push_back(entry(below(random, c.held[b] / 2 + 1), c.capacity));
  return c;
}

/// Returns what the rows of a tile see by the contract: query i and key j with -left <= j - diagonal <= right.
template <int kM>
Range seen(const SplitKeys& schedule, Span span, int keys, int m_block) {
  Range seen{kMax, 0};
  const int heads = schedule.packing.heads.value;
  for (int query = m_block * kM / heads; query < std::min(span.used, ((m_block + 1) * kM - 1) / heads + 1); ++query) {
    const std::int64_t diagonal = std::int64_t{query} + keys - span.used;
    for (int j = 0; j < keys; ++j) {
      if (j - diagonal < -schedule.mask.band.left || j - diagonal > schedule.mask.band.right) continue;
      seen.begin = std::min(seen.begin, j);
      seen.end = std::max(seen.end, j + 1);
    }
  }
  return seen.empty() ? Range{} : seen;
}

/// Expects that tiles have every row, and items every key, once.
template <int kM, int kItem>
void expect_all_keys_once(const SplitKeys& schedule) {
  for (int b = 0; b < schedule.queries.entries(); ++b) {
    const Span span = schedule.queries.at(b);
    const CachedRows::Rows counting = schedule.rows.at(b);
    const int keys = counting.end - counting.begin;
    const int heads = schedule.packing.heads.value;
    const int tiles = schedule.tiles_of<kM>(span);
    ASSERT_GE(tiles * kM, span.size * heads);
    ASSERT_LT((tiles - 1) * kM, span.size * heads);
    int items = 0;
    for (int m = 0; m < tiles; ++m) {
      const SplitKeys::Tile tile = schedule.tile<kM, kItem>(span, counting, m);
      SCOPED_TRACE("sequence " + std::to_string(b) + ", tile " + std::to_string(m));
      ASSERT_EQ(tile.lengths, (Lengths{span.used, keys}));
      const int first = m * kM, end = std::min(first + kM, span.used * heads);
      ASSERT_EQ(tile.queries.empty(), end <= first);
      if (end > first) {
        ASSERT_EQ(tile.queries, (Range{first / heads, (end - 1) / heads + 1}));
      }
      items += tile.items;
      ASSERT_GE(tile.items, 1);
      const Range expected = seen<kM>(schedule, span, keys, m);
      if (expected.empty()) {
        ASSERT_EQ(tile.keys, Range{});
        ASSERT_EQ(tile.items, 1);
        continue;
      }
      // Items follow each other without gaps: they hold all keys if the first begins, and the last ends, with them.
      const int unit = schedule.keys_of_split > 0 ? schedule.keys_of_split : kItem;
      ASSERT_EQ(tile.keys, (Range{expected.begin / unit * unit, expected.end}));
      ASSERT_EQ(tile.split % kItem, 0);
      ASSERT_GT(tile.split, 0);
      const int parts = Spans::tiles(tile.keys.end - tile.keys.begin, tile.split);
      ASSERT_EQ(tile.items, schedule.splits() && !schedule.apart ? 1 : parts);
      if (schedule.num_splits == 0) {
        ASSERT_EQ(tile.split, unit);
      } else {
        ASSERT_LE(parts, schedule.num_splits);
        // These are the shortest splits that give no more than that.
        ASSERT_GT(tile.keys.end - tile.keys.begin, (tile.split - kItem) * schedule.num_splits);
      }
    }
    ASSERT_EQ((schedule.items_of<kM, kItem>(b)), items);
  }
}

template <int kM, int kItem>
void expect_all_keys_once_however_split(SplitKeys schedule, std::mt19937& random) {
  expect_all_keys_once<kM, kItem>(schedule);
  for (const bool apart : {false, true}) {
    schedule.apart = apart;
    schedule.num_splits = 0;
    schedule.keys_of_split = pick(random, {1, 2, 8}) * kItem;
    expect_all_keys_once<kM, kItem>(schedule);
    schedule.keys_of_split = 0;
    schedule.num_splits = pick(random, {1, 2, 3, 7, 200});
    expect_all_keys_once<kM, kItem>(schedule);
  }
}

TEST(SplitKeys, ItemsHoldEveryKeyThatIsSeenOnce) {
  std::mt19937 random(1);
  for (int run = 0; run < 2000 && !testing::Test::HasFatalFailure(); ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    const Case c = random_case(random, run % 4 == 0);
    expect_all_keys_once_however_split<16, 64>(c.schedule(), random);
    expect_all_keys_once_however_split<16, 256>(c.schedule(), random);
    expect_all_keys_once_however_split<64, 64>(c.schedule(), random);
  }
}

/// Expects that a block of keys is not tested if, and only if, all rows of the tile see all of it by the contract, and
/// the column mask has none of it, in each part of the tile's keys.
template <int kM, int kItem, int kN>
void expect_exact_interiors(const SplitKeys& schedule) {
  for (int b = 0; b < schedule.queries.entries(); ++b) {
    const Span span = schedule.queries.at(b);
    const CachedRows::Rows counting = schedule.rows.at(b);
    const Band band = schedule.mask.band;
    for (int m = 0; m < schedule.tiles_of<kM>(span); ++m) {
      const SplitKeys::Tile tile = schedule.tile<kM, kItem>(span, counting, m);
      const int keys = tile.lengths.k, unmasked = keys - schedule.masked.count;
      for (int first = tile.keys.begin; first < tile.keys.end; first += tile.split) {
        const int end = std::min(first + tile.split, tile.keys.end);
        const BlockWalk walk = schedule.walk(tile, {first, end}, kN);
        ASSERT_EQ(walk.visible, (Range{0, Spans::tiles(end - first, kN)}));
        for (int block = 0; block < walk.end(); ++block) {
          const Range those{first + block * kN, first + (block + 1) * kN};
          bool seen = those.end <= end && those.end <= unmasked;
          for (int query = tile.queries.begin; query < tile.queries.end; ++query) {
            const std::int64_t diagonal = std::int64_t{query} + keys - tile.lengths.q;
            seen &= those.begin - diagonal >= -band.left && those.end - 1 - diagonal <= band.right;
          }
          ASSERT_EQ(walk.is_edge(block), !seen) << "sequence " << b << ", tile " << m << ", keys from " << those.begin;
        }
      }
    }
  }
}

TEST(SplitKeys, OnlyBlocksThatAllRowsSeeAreNotTested) {
  std::mt19937 random(3);
  for (int run = 0; run < 500 && !testing::Test::HasFatalFailure(); ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    const Case c = random_case(random, run % 4 == 0);
    SplitKeys schedule = c.schedule();
    schedule.masked.count = pick(random, {0, 1, 7, 64, 65, 500, 3000});
    schedule.keys_of_split = pick(random, {0, 64, 1024});
    expect_exact_interiors<16, 64, 16>(schedule);
    expect_exact_interiors<16, 64, 32>(schedule);
    expect_exact_interiors<64, 64, 64>(schedule);
  }
}

void expect_same_tile(const SplitKeys::Tile& found, const SplitKeys::Tile& tile) {
  ASSERT_EQ(found.lengths, tile.lengths);
  ASSERT_EQ(found.keys, tile.keys);
  ASSERT_EQ(found.items, tile.items);
  if (tile.queries.empty() && found.queries.empty()) return;
  ASSERT_EQ(found.queries, tile.queries);
  if (tile.keys.empty()) return;
  ASSERT_EQ(found.split, tile.split);
}

/// Expects of a plain schedule that plain_tile() and plain_walk() say what tile() and walk() do, and whole_tile() too
/// where it may be asked.
template <int kM, int kItem, int kN>
void expect_plain_tiles(const SplitKeys& schedule) {
  for (int b = 0; b < schedule.queries.entries(); ++b) {
    const Span span = schedule.queries.at(b);
    const CachedRows::Rows counting = schedule.rows.at(b);
    const bool one = schedule.has_one_tile_each(kM);
    ASSERT_TRUE(!one || schedule.tiles_of<kM>(span) == 1);
    for (int m = 0; m < schedule.tiles_of<kM>(span); ++m) {
      const SplitKeys::Tile tile = schedule.tile<kM, kItem>(span, counting, m);
      const SplitKeys::Tile plain = schedule.plain_tile<kM, kItem>(span, counting.end, m);
      expect_same_tile(plain, tile);
      if (one) expect_same_tile(schedule.whole_tile<kItem>(schedule.rows.held[b]), tile);
      for (int first = tile.keys.begin; first < tile.keys.end; first += tile.split) {
        const Range keys = {first, std::min(first + tile.split, tile.keys.end)};
        const BlockWalk walk = schedule.walk(tile, keys, kN), found = schedule.plain_walk(plain, keys, kN);
        ASSERT_EQ(found.visible, walk.visible);
        for (int block = 0; block < walk.end(); ++block) ASSERT_EQ(found.is_edge(block), walk.is_edge(block));
      }
    }
  }
}

TEST(SplitKeys, PlainTilesAreWhatTilesAre) {
  std::mt19937 random(5);
  int plain = 0, of_one_tile_each = 0;
  for (int run = 0; run < 60000 && !testing::Test::HasFatalFailure(); ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    const Case c = random_case(random, run % 4 == 0);
    SplitKeys schedule = c.schedule();
    schedule.masked.count = pick(random, {0, 0, 7});
    schedule.num_splits = pick(random, {0, 0, 1, 2});
    schedule.keys_of_split = pick(random, {0, 128});
    schedule.apart = random() % 2 == 0;
    if (random() % 2 == 0) schedule.most_queries = below(random, 4);
    if (!schedule.plain()) continue;
    ++plain;
    of_one_tile_each += schedule.has_one_tile_each(16);
    expect_plain_tiles<16, 64, 16>(schedule);
    expect_plain_tiles<16, 128, 32>(schedule);
    if (schedule.keys_of_split == 0) expect_plain_tiles<8, 192, 32>(schedule);  // six warps
  }
  EXPECT_GT(plain, 1000);
  EXPECT_GT(of_one_tile_each, 100);
}

TEST(SplitKeys, OfRowsThatDoNotCountAreOneItem) {
  const std::vector<int> held = {500, 500}, begins = {0, 3, 5};
  SplitKeys schedule{.queries = {2, 60, begins.data()}, .rows = {2, 1000, held.data()}, .packing = {Divisor(4)}};
  EXPECT_EQ((schedule.items_of<16, 64>(0)), 8);
  EXPECT_EQ((schedule.items_of<16, 64>(1)), 8 + 14);  // 57 rows of four heads, of which two rows count
  schedule.rows.batch = schedule.queries.batch = 0;
  EXPECT_EQ((schedule.items_of<16, 64>(0)), 15);
}

TEST(SplitKeys, SequencesOfMoreQueriesAreAnotherKernels) {
  std::mt19937 random(4);
  for (int run = 0; run < 300; ++run) {
    const Case c = random_case(random, false);
    SplitKeys schedule = c.schedule();
    std::vector<int> all;
    for (int b = 0; b < schedule.queries.entries(); ++b) all.push_back(schedule.items_of<16, 64>(b));
    schedule.most_queries = below(random, 50);
    for (int b = 0; b < schedule.queries.entries(); ++b) {
      const bool more = schedule.queries.at(b).used > schedule.most_queries;
      ASSERT_EQ((schedule.items_of<16, 64>(b)), more ? 0 : all[static_cast<std::size_t>(b)]);
    }
  }
}

/// Expects that all that a row's result depends on is the same, apart from keys and values.
void expect_same(const SplitKeys::Tile& a, const SplitKeys::Tile& b) {
  EXPECT_EQ(a.lengths, b.lengths);
  EXPECT_EQ(a.queries, b.queries);
  EXPECT_EQ(a.keys, b.keys);
  EXPECT_EQ(a.split, b.split);
}

TEST(SplitKeys, SplitsAreTheSameWhateverElseThereIs) {
  constexpr int kM = 16, kItem = 128, kSplit = 1024;
  for (const Band band : {Band::full(), Band::causal(), Band{1500, 0}, Band{3000, 20}}) {
    for (const int length : {0, 1, 900, 1024, 1025, 2049, 5000}) {
      const std::vector<int> alone = {length}, neighbours = {4000, 17, length, 0, 5000},
                             begins = {3, 40, 41, 74, 74, 90};
      SplitKeys schedule{.queries = {1, 33, nullptr},
                         .rows = {1, 5000, alone.data()},
                         .mask = {band},
                         .packing = {Divisor(3)},
                         .keys_of_split = kSplit,
                         .apart = true};
      SplitKeys among{.queries = {5, 100, begins.data()},
                      .rows = {5, 9000, neighbours.data()},
                      .mask = {band},
                      .packing = {Divisor(3)},
                      .keys_of_split = kSplit,
                      .apart = false};
      for (int m = 0; m < 7; ++m) {
        const auto tile = schedule.tile<kM, kItem>(schedule.queries.at(0), schedule.rows.at(0), m);
        EXPECT_EQ(tile.keys.begin % kSplit, 0);
        EXPECT_TRUE(tile.keys.empty() || tile.split == kSplit);
        expect_same(among.tile<kM, kItem>(among.queries.at(2), among.rows.at(2), m), tile);
      }
      // Where the number of splits is given, they depend on the sequence alone too.
      for (SplitKeys* s : {&schedule, &among}) s->keys_of_split = 0, s->num_splits = 3;
      for (int m = 0; m < 7; ++m)
        expect_same(among.tile<kM, kItem>(among.queries.at(2), among.rows.at(2), m),
                    schedule.tile<kM, kItem>(schedule.queries.at(0), schedule.rows.at(0), m));
    }
  }
}

TEST(SplitKeys, SplitsStayWhereTheyAreAsASequenceGrows) {
  std::vector<int> held = {0};
  SplitKeys schedule{.queries = {1, 1, nullptr},
                     .rows = {1, 10000, held.data()},
                     .mask = {Band::causal()},
                     .packing = {Divisor(4)},
                     .keys_of_split = 512,
                     .apart = true};
  for (int length = 1; length <= 3000; ++length) {
    held[0] = length;
    const auto tile = schedule.tile<16, 64>(schedule.queries.at(0), schedule.rows.at(0), 0);
    ASSERT_EQ(tile.keys, (Range{0, length}));
    ASSERT_EQ(tile.split, 512);
    ASSERT_EQ(tile.items, (length + 511) / 512);
  }
}

void expect_shares(int items, int teams) {
  SCOPED_TRACE(std::to_string(items) + " items, " + std::to_string(teams) + " teams");
  const TeamShares shares = TeamShares::of(items, Divisor(teams));
  ASSERT_EQ(shares.first_item(0), 0);
  ASSERT_EQ(shares.first_item(teams), items);
  for (int team = 0; team < teams; ++team) {
    const int begin = shares.first_item(team), end = shares.first_item(team + 1);
    ASSERT_TRUE(end - begin == items / teams || end - begin == items / teams + 1) << team;
    ASSERT_TRUE(end > begin || begin == items) << team << ": a team without items is not between two with items";
    const bool large = end - begin > 1000;  // of a large share only the ends are tested
    for (int n = 0; n < (large ? 100 : end - begin); ++n) {
      ASSERT_EQ(shares.team_of(begin + n), team) << begin + n;
      ASSERT_EQ(shares.team_of(end - 1 - n), team) << end - 1 - n;
    }
  }
}

TEST(TeamShares, AreAllItemsOnce) {
  for (int items = 0; items <= 300; ++items)
    for (const int teams : {1, 2, 3, 7, 31, 132, 264}) expect_shares(items, teams);
  for (int items = kMax - 3; items > 0; items /= 7)
    for (const int teams : {1, 2, 3, 108, 131, 132, 264}) expect_shares(items, teams);
  for (const int teams : {2, 132, 264}) expect_shares(kMax, teams);
}

}  // namespace
}  // namespace flashtile
