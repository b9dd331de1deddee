#include "flashtile/descales.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

namespace flashtile {
namespace {

TensorView floats(std::vector<float>& values, std::initializer_list<std::int64_t> shape) {
  TensorView view{.data = values.data(), .dtype = DType::kFloat32, .rank = static_cast<int>(shape.size())};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; stride *= view.shape[i--]) view.strides[i] = stride;
  return view;
}

float at(const Descales& descales, int batch, int head, int row) {
  return descales.at(descales.of_head(batch, head), row);
}

TEST(Descales, NoneIsOne) {
  EXPECT_EQ(at(Descales{}, 1, 2, 300), 1);
  EXPECT_EQ(at(Descales::of({}, 100, 4), 0, 3, 99), 1);
}

TEST(Descales, OfHeadsOfBlocksAndOfKvHeads) {
  std::vector<float> values(2 * 4 * 5);
  std::iota(values.begin(), values.end(), 1.0f);
  const Descales of_heads = Descales::of(floats(values, {2, 4}), 1000, 4);
  EXPECT_EQ(at(of_heads, 1, 2, 0), 7);
  EXPECT_EQ(at(of_heads, 1, 2, 999), 7);
  const Descales of_kv_heads = Descales::of(floats(values, {2, 4}), 1000, 8);  // each for two query heads
  EXPECT_EQ(at(of_kv_heads, 1, 5, 10), 7);
  const Descales of_128 = Descales::of(floats(values, {2, 4, 5}), 600, 4);
  EXPECT_EQ(at(of_128, 1, 3, 127), 36);
  EXPECT_EQ(at(of_128, 1, 3, 128), 37);
  const Descales of_64 = Descales::of(floats(values, {2, 4, 5}), 300, 4);
  EXPECT_EQ(at(of_64, 0, 0, 63), 1);
  EXPECT_EQ(at(of_64, 0, 0, 299), 5);
}

TEST(Descales, WhatAKernelTakesThemFor) {
  EXPECT_EQ(usable_descale(0.25f), 0.25f);
  EXPECT_EQ(usable_descale(0), 0x1p-60f);
  EXPECT_EQ(usable_descale(0x1p-100f), 0x1p-60f);
  EXPECT_TRUE(std::isnan(usable_descale(-1)));
  EXPECT_TRUE(std::isnan(usable_descale(NAN)));
  EXPECT_EQ(std::log2(usable_descale(0)), kLog2OfNoDescale);
}

}  // namespace
}  // namespace flashtile
