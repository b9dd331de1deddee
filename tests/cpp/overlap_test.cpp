// These tests check which tensors have memory in common: by hand for layouts of caches, and against every pair of
// elements for other layouts.
#include "../../cpp/overlap.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace flashtile {
namespace {

alignas(16) char memory[1 << 20];  // never read

TensorView view(std::int64_t first, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                DType dtype = DType::kFloat16) {
  TensorView v;
  v.data = memory + (1 << 19) + first * bytes_of(dtype);
  v.dtype = dtype;
  v.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), v.shape.begin());
  std::copy(strides.begin(), strides.end(), v.strides.begin());
  return v;
}

bool stretches_meet(const TensorView& a, const TensorView& b) {
  return stretch_of(a).meets(stretch_of(b));
}

std::set<std::int64_t> elements(const TensorView& v) {
  std::set<std::int64_t> found{static_cast<const char*>(v.data) - memory};
  for (int i = 0; i < v.rank; ++i) {
    std::set<std::int64_t> further;
    for (const std::int64_t place : found)
      for (std::int64_t n = 0; n < v.shape[i]; ++n) further.insert(place + n * v.strides[i] * bytes_of(v.dtype));
    found = further;
  }
  return found;
}

TEST(Overlap, OfCaches) {
  // This layout is (pages, 2, page_size, H, D), in which some libraries keep keys and values.
  const TensorView keys = view(0, {5, 4, 2, 8}, {2 * 64, 16, 8, 1});
  EXPECT_TRUE(stretches_meet(keys, view(64, {5, 4, 2, 8}, {2 * 64, 16, 8, 1})));
  EXPECT_FALSE(share_elements(keys, view(64, {5, 4, 2, 8}, {2 * 64, 16, 8, 1})));
  EXPECT_TRUE(share_elements(keys, view(128, {5, 4, 2, 8}, {2 * 64, 16, 8, 1})));
  // This layout is (pages, page_size, H, D + D_v), whose last dimension keys and values share.
  const TensorView left = view(0, {5, 4, 2, 8}, {96, 24, 12, 1});
  EXPECT_FALSE(share_elements(left, view(8, {5, 4, 2, 4}, {96, 24, 12, 1})));
  EXPECT_TRUE(share_elements(left, view(7, {5, 4, 2, 4}, {96, 24, 12, 1})));
  EXPECT_TRUE(share_elements(left, left));
  // These lie one after the other, and far apart.
  EXPECT_FALSE(stretches_meet(view(0, {4, 8}, {8, 1}), view(32, {4, 8}, {8, 1})));
  EXPECT_TRUE(stretches_meet(view(0, {4, 8}, {8, 1}), view(31, {4, 8}, {8, 1})));
}

TEST(Overlap, OfNothing) {
  const TensorView whole = view(0, {4, 8}, {8, 1});
  EXPECT_FALSE(stretches_meet(whole, view(0, {0, 8}, {8, 1})));
  EXPECT_FALSE(share_elements(whole, TensorView{}));
  EXPECT_FALSE(stretches_meet(whole, TensorView{}));
}

TEST(Overlap, IsThatOfTheElements) {
  std::mt19937 random(1);
  const auto pick = [&](int first, int last) {
    return std::uniform_int_distribution<std::int64_t>(first, last)(random);
  };
  int shared = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const auto any = [&] {
      std::vector<std::int64_t> shape, strides;
      for (int rank = static_cast<int>(pick(1, 4)); rank > 0; --rank)
        shape.push_back(pick(1, 4)), strides.push_back(pick(trial % 2 == 0 ? 0 : -20, 40));
      return view(pick(-60, 60), shape, strides);
    };
    const TensorView a = any(), b = any();
    const std::set<std::int64_t> x = elements(a), y = elements(b);
    bool expected = false;
    for (const std::int64_t place : x) expected |= y.contains(place);
    EXPECT_EQ(share_elements(a, b), expected) << trial;
    EXPECT_TRUE(stretches_meet(a, b) || !expected) << trial;
    shared += expected;
  }
  EXPECT_GT(shared, 300);
  EXPECT_LT(shared, 2700);
}

TEST(Overlap, OfOneTensorWithItself) {
  EXPECT_FALSE(may_overlap_itself(view(0, {2, 30, 4, 16}, {1920, 64, 16, 1})));
  EXPECT_FALSE(may_overlap_itself(view(0, {2, 30, 4, 16}, {1920, 16, 480, 1})));  // heads first
  EXPECT_FALSE(may_overlap_itself(view(0, {2, 30, 4, 16}, {64, 128, 16, 1})));    // sequence first
  EXPECT_FALSE(may_overlap_itself(view(0, {2, 30, 4, 16}, {-2400, 80, 20, 1})));  // padded, reversed
  EXPECT_FALSE(may_overlap_itself(view(0, {1, 30, 4, 16}, {0, 64, 16, 1})));      // one entry
  EXPECT_FALSE(may_overlap_itself(view(0, {0, 30, 4, 16}, {0, 0, 0, 0})));        // nothing
  EXPECT_TRUE(may_overlap_itself(view(0, {2, 30, 4, 16}, {1920, 64, 8, 1})));
  EXPECT_TRUE(may_overlap_itself(view(0, {1, 4, 1, 8}, {64, 4, 8, 1})));
  EXPECT_TRUE(
      may_overlap_itself(view(0, {2, 30, 4, 16}, {1856, 64, 16, 1})));  // the last row is the next entry's first
  EXPECT_FALSE(may_overlap_itself(view(0, {2, 3}, {3, 2})));            // rows lie in one another
  EXPECT_TRUE(may_overlap_itself(view(0, {3, 4}, {3, 2})));
}

TEST(Overlap, OfOneTensorIsThatOfItsElements) {
  std::mt19937 random(2);
  const auto pick = [&](int first, int last) {
    return std::uniform_int_distribution<std::int64_t>(first, last)(random);
  };
  int overlapping = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<std::int64_t> shape, strides;
    std::size_t count = 1;
    for (int rank = static_cast<int>(pick(1, 4)); rank > 0; --rank) {
      shape.push_back(pick(1, 4)), strides.push_back(pick(trial % 2 == 0 ? 0 : -20, 40));
      count *= shape.back();
    }
    const TensorView a = view(0, shape, strides);
    const bool expected = elements(a).size() < count;
    EXPECT_EQ(may_overlap_itself(a), expected) << trial;
    overlapping += expected;
  }
  EXPECT_GT(overlapping, 300);
  EXPECT_LT(overlapping, 2700);
}

}  // namespace
}  // namespace flashtile
