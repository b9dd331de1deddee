// These tests check where rows of a cache lie, and which of them count: always inside it, whatever the tables hold.
#include "flashtile/cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "flashtile/sequence.h"

namespace flashtile {
namespace {

constexpr int kMin = std::numeric_limits<int>::min(), kMax = std::numeric_limits<int>::max();

std::vector<int> garbage(std::mt19937& random, int count, int size) {
  std::vector<int> values(count);
  for (int& value : values) {
    const int numbers[] = {kMin, kMax, -1, 0, size, size + 1, static_cast<int>(random() % (2 * size + 1)) - size / 2};
    value = numbers[random() % std::size(numbers)];
  }
  return values;
}

void expect_place(const Pages::Place& found, int page, int row) {
  EXPECT_EQ(found.page, page);
  EXPECT_EQ(found.row, row);
}

TEST(Pages, OfAContiguousCacheAreItsEntries) {
  const int entries[] = {2, 0};
  expect_place(Pages{.pages = 3, .size = Divisor(10)}.at(1, 7), 1, 7);
  expect_place(Pages{.table = entries, .table_stride = 1, .pages = 3, .size = Divisor(10)}.at(0, 9), 2, 9);
}

TEST(Pages, OfASequenceAreThoseOfItsTable) {
  const std::array table{5, 1, 4, -9, 0, 2, 3, -9};  // the rows of this table have three entries and a stride of four
  const Pages pages{.table = table.data(), .table_stride = 4, .of_sequence = 3, .pages = 6, .size = Divisor(16)};
  expect_place(pages.at(0, 0), 5, 0);
  expect_place(pages.at(0, 15), 5, 15);
  expect_place(pages.at(0, 16), 1, 0);
  expect_place(pages.at(1, 47), 3, 15);
  const Pages single{.table = table.data(), .table_stride = 4, .of_sequence = 3, .pages = 6, .size = Divisor(1)};
  expect_place(single.at(0, 2), 4, 0);
}

TEST(Pages, ExistWhateverTheTableHolds) {
  std::mt19937 random(1);
  for (int run = 0; run < 500; ++run) {
    const int of_sequence = 1 + static_cast<int>(random() % 5), pages = 1 + static_cast<int>(random() % 9);
    const int size = 1 + static_cast<int>(random() % 4);
    const std::vector<int> table = garbage(random, 2 * of_sequence, pages);
    const Pages cache{table.data(), of_sequence, of_sequence, pages, Divisor(size)};
    for (int b = 0; b < 2; ++b) {
      for (int row = 0; row < of_sequence * size; ++row) {
        const Pages::Place place = cache.at(b, row);
        ASSERT_GE(place.page, 0);
        ASSERT_LT(place.page, pages);
        ASSERT_EQ(place.row, row % size);
      }
    }
  }
}

void expect_rows(const CachedRows::Rows& found, int begin, int held, int end) {
  EXPECT_EQ(found.begin, begin);
  EXPECT_EQ(found.held, held);
  EXPECT_EQ(found.end, end);
}

TEST(CachedRows, AreThoseHeldAndThoseAdded) {
  const int held[] = {0, 4, 10}, skipped[] = {0, 3, 1}, begins[] = {0, 2, 2, 7};
  const CachedRows plain{.batch = 3, .capacity = 10, .held = held};
  expect_rows(plain.at(0), 0, 0, 0);
  expect_rows(plain.at(2), 0, 10, 10);
  const CachedRows dense{.batch = 3, .capacity = 10, .held = held, .skipped = skipped, .added = 2};
  expect_rows(dense.at(0), 0, 0, 2);
  expect_rows(dense.at(1), 3, 4, 6);
  expect_rows(dense.at(2), 1, 10, 10);  // there is no room for its new rows
  const CachedRows ragged{.batch = 3, .capacity = 12, .held = held, .added = 8, .added_begins = begins};
  expect_rows(ragged.at(0), 0, 0, 2);
  expect_rows(ragged.at(1), 0, 4, 4);
  expect_rows(ragged.at(2), 0, 10, 12);  // there is room for two of its five rows
}

TEST(CachedRows, LieInsideWhateverTheTablesHold) {
  std::mt19937 random(2);
  for (int run = 0; run < 2000; ++run) {
    const int batch = 1 + static_cast<int>(random() % 4), capacity = static_cast<int>(random() % 20);
    const int added = static_cast<int>(random() % 20);
    const std::vector<int> held = garbage(random, batch, capacity), skipped = garbage(random, batch, capacity);
    const std::vector<int> begins = garbage(random, batch + 1, added);
    const bool ragged = random() % 2 == 0;
    const CachedRows cached{batch, capacity, held.data(), skipped.data(), added, ragged ? begins.data() : nullptr};
    for (int b = 0; b < batch; ++b) {
      const CachedRows::Rows rows = cached.at(b);
      ASSERT_GE(rows.begin, 0);
      ASSERT_LE(rows.begin, rows.end);
      ASSERT_GE(rows.held, 0);
      ASSERT_LE(rows.held, rows.end);
      ASSERT_LE(rows.end, capacity);
      // The added rows can be read: they are no more than the sequence has in the tensor.
      const Spans given{batch, added, ragged ? begins.data() : nullptr, nullptr};
      ASSERT_LE(rows.end - rows.held, given.at(b).used);
    }
  }
}

TEST(CachedRows, OfNoSequencesAreNone) {
  const int begins[] = {0};
  expect_rows(CachedRows{.capacity = 10, .added = 7, .added_begins = begins}.at(0), 0, 0, 0);
}

TEST(CacheDescales, OfAllOfHeadsAndOfRows) {
  std::vector<float> values(2 * 3 * 4);
  std::iota(values.begin(), values.end(), 1.0f);
  const auto view = [&](std::initializer_list<std::int64_t> shape) {
    TensorView t{.data = values.data(), .dtype = DType::kFloat32, .rank = static_cast<int>(shape.size())};
    std::copy(shape.begin(), shape.end(), t.shape.begin());
    std::int64_t stride = 1;
    for (int i = t.rank - 1; i >= 0; stride *= t.shape[i--]) t.strides[i] = stride;
    return t;
  };
  const Pages::Place place{1, 2};
  EXPECT_EQ(CacheDescales::of({}).of(1, 3, place), 1);
  EXPECT_EQ(CacheDescales::of(view({})).of(1, 3, place), 1);
  EXPECT_EQ(CacheDescales::of(view({1})).of(1, 3, place), 1);
  EXPECT_EQ(CacheDescales::of(view({2, 4})).of(1, 3, place), 8);
  const CacheDescales of_rows = CacheDescales::of(view({2, 3, 4}));
  EXPECT_TRUE(of_rows.of_rows);
  EXPECT_EQ(of_rows.of(0, 3, place), 24);  // whatever the sequence is
}

}  // namespace
}  // namespace flashtile
