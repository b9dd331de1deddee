// These tests check that the small cache answers as if everything were made anew.
#include "../../cpp/recent.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace flashtile {
namespace {

TEST(Recent, MakesWhatIsNewAndForgetsTheOldest) {
  Recent<int, int, 3> recent;
  int made = 0;
  const auto square = [&](int key) { return recent.get(key, [&] { return ++made, key * key; }); };
  for (const int key : {1, 2, 3, 1, 2, 3}) EXPECT_EQ(square(key), key * key);
  EXPECT_EQ(made, 3);
  EXPECT_EQ(square(4), 16);  // takes the entry of 1
  EXPECT_EQ(square(2), 4);
  EXPECT_EQ(made, 4);
  EXPECT_EQ(square(1), 1);
  EXPECT_EQ(made, 5);
}

TEST(Recent, KeepsNothingOfAFailure) {
  Recent<int, int, 2> recent;
  EXPECT_THROW(recent.get(0, []() -> int { throw std::runtime_error("no"); }), std::runtime_error);
  EXPECT_EQ(recent.get(0, [] { return 7; }), 7);  // a key that equals that of an unused entry is made too
}

}  // namespace
}  // namespace flashtile
