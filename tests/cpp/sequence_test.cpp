// These tests check where sequences lie: always inside the tensor, and with slots of their own for their tiles.
#include "flashtile/sequence.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "flashtile/problem.h"

namespace flashtile {
namespace {

struct Tables {
  std::vector<int> begins;
  std::vector<int> used;

  Spans spans(int size) const {
    return {static_cast<int>(begins.size()) - 1, size, begins.data(), used.empty() ? nullptr : used.data()};
  }
};

/// Returns legal tables, with empty sequences among others, and perhaps rows after the last one.
Tables legal(std::mt19937& random, int batch, int longest) {
  Tables t{{0}, {}};
  for (int b = 0; b < batch; ++b) {
    const int length = random() % 3 == 0 ? 0 : static_cast<int>(random() % (longest + 1));
    t.begins.push_back(t.begins.back() + length);
    t.used.push_back(static_cast<int>(random() % (length + 1)));
  }
  if (random() % 2 == 0) t.used.clear();
  return t;
}

Tables garbage(std::mt19937& random, int batch, int size) {
  constexpr int kMin = std::numeric_limits<int>::min(), kMax = std::numeric_limits<int>::max();
  const auto number = [&]() -> int {
    const int numbers[] = {kMin, kMax, -1, 0, size, size + 1, static_cast<int>(random() % (2 * size + 1)) - size / 2};
    return numbers[random() % std::size(numbers)];
  };
  Tables t;
  for (int b = 0; b < batch; ++b) t.begins.push_back(number()), t.used.push_back(number());
  t.begins.push_back(number());
  return t;
}

void expect_inside(const Span& span, int size) {
  ASSERT_GE(span.first, 0);
  ASSERT_GE(span.size, 0);
  ASSERT_LE(span.first + span.size, size);
  ASSERT_GE(span.used, 0);
  ASSERT_LE(span.used, span.size);
}

TEST(Spans, LieInsideTheTensorWhateverTheTablesHold) {
  std::mt19937 random(1);
  for (int run = 0; run < 2000; ++run) {
    const int batch = 1 + static_cast<int>(random() % 6), size = static_cast<int>(random() % 50);
    const Tables tables = garbage(random, batch, size);
    const Spans spans = tables.spans(size);
    for (int b = 0; b < batch; ++b) {
      const Span span = spans.at(b);
      expect_inside(span, size);
      for (const int tile : {1, 4, 16, 64}) {
        const int first = spans.first_place(b, span.first, tile);
        ASSERT_GE(first, 0);
        ASSERT_LE(first + Spans::tiles(span.size, tile), spans.places(tile));
      }
    }
    for (int place = 0; place < spans.places(8); ++place) {
      const int entry = spans.entry_of(place, 8);
      ASSERT_GE(entry, 0);
      ASSERT_LT(entry, batch);
    }
  }
}

TEST(Spans, HaveEveryRowOnce) {
  std::mt19937 random(2);
  for (int run = 0; run < 500; ++run) {
    const int batch = 1 + static_cast<int>(random() % 6), behind = static_cast<int>(random() % 9);
    const Tables tables = legal(random, batch, 40);
    const int end = tables.begins.back(), size = end + behind;
    const Spans spans = tables.spans(size);
    int next = 0;
    for (int b = 0; b < batch; ++b) {
      const Span span = spans.at(b);
      ASSERT_EQ(span.first, next);
      next += span.size;
      const int length = tables.begins[b + 1] - tables.begins[b];
      ASSERT_EQ(span.size, length + (b + 1 == batch ? behind : 0));
      ASSERT_EQ(span.used, tables.used.empty() ? length : tables.used[b]);
    }
    ASSERT_EQ(next, size);
  }
}

/// Expects that each entry has slots for its tiles, and that every slot belongs to one entry.
void expect_places(const Spans& spans, int tile) {
  int free = 0;
  for (int b = 0; b < spans.batch; ++b) {
    const Span span = spans.at(b);
    const int first = spans.first_place(b, span.first, tile);
    ASSERT_GE(first, free) << "entry " << b << ", tile " << tile;
    free = first + Spans::tiles(span.size, tile);
    const int next = b + 1 < spans.batch ? spans.first_place(b + 1, spans.at(b + 1).first, tile) : spans.places(tile);
    ASSERT_LE(free, next);
    ASSERT_LE(next, free + 1);
    for (int place = first; place < next; ++place) ASSERT_EQ(spans.entry_of(place, tile), b);
  }
  ASSERT_LE(free, spans.places(tile));
}

TEST(Spans, TilesHavePlacesOfTheirOwn) {
  std::mt19937 random(3);
  for (int run = 0; run < 500; ++run) {
    const Tables tables = legal(random, 1 + static_cast<int>(random() % 9), 40);
    const int size = tables.begins.back() + static_cast<int>(random() % 40);
    for (const int tile : {1, 3, 16, 64}) expect_places(tables.spans(size), tile);
  }
  for (const int size : {1, 16, 17}) expect_places({3, size, nullptr, nullptr}, 16);
}

TEST(Spans, WithoutSequencesAllRowsAreUnused) {
  const int begins[] = {0};
  for (const int size : {0, 1, 16, 30}) {
    const Spans none{0, size, begins, nullptr};
    EXPECT_EQ(none.entries(), 1);
    EXPECT_EQ(none.at(0).size, size);
    EXPECT_EQ(none.at(0).used, 0);
    EXPECT_GE(none.places(16), Spans::tiles(size, 16));
    EXPECT_EQ(none.first_place(0, 0, 16), 0);
  }
  EXPECT_EQ((Spans{0, 30, nullptr, nullptr}).places(16), 0);
}

TEST(Spans, OfADenseBatchAreWholeAndMayCountInPart) {
  const int used[] = {5, -1, 100};
  for (int b = 0; b < 3; ++b) {
    const Span whole = Spans{3, 40, nullptr, nullptr}.at(b), part = Spans{3, 40, nullptr, used}.at(b);
    EXPECT_EQ(whole.first, 0);
    EXPECT_EQ(whole.size, 40);
    EXPECT_EQ(whole.used, 40);
    EXPECT_EQ(part.size, 40);
    EXPECT_EQ(part.used, b == 0 ? 5 : b == 1 ? 0 : 40);
  }
}

TEST(Sequences, AreThoseOfTheTables) {
  int begins_q[] = {0, 3, 10}, begins_k[] = {0, 8, 8}, used_q[] = {3, 4};
  ForwardTensors t;
  t.cu_seqlens_q.data = begins_q;
  t.cu_seqlens_k.data = begins_k;
  t.seqused_q.data = used_q;
  Problem p;
  p.ragged = true;
  p.batch = 2;
  p.seqlen_q = 12;
  p.seqlen_k = 9;
  const Sequence first = p.sequences(t).at(0), second = p.sequences(t).at(1);
  EXPECT_EQ(first.lengths(), (Lengths{3, 8}));
  EXPECT_EQ(second.lengths(), (Lengths{4, 0}));
  EXPECT_EQ(second.q.first, 3);
  EXPECT_EQ(second.q.size, 9);
  EXPECT_EQ(second.k.size, 1);
}

TEST(Sequences, EstimatesTakeThemForEquallyLong) {
  Problem p;
  p.batch = 3;
  p.seqlen_q = 10;
  p.seqlen_k = 12;
  EXPECT_EQ(p.dense(), p);
  p.ragged = true;
  EXPECT_FALSE(p.dense().ragged);
  EXPECT_EQ(p.dense().lengths(), (Lengths{4, 4}));
  p.batch = 0;
  EXPECT_EQ(p.dense().batch, 0);
}

}  // namespace
}  // namespace flashtile
