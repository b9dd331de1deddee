// This file passes values between the lanes of a warp.
#pragma once

#include <cstring>
#include <cute/config.hpp>
#include <type_traits>

namespace flashtile {

/// Returns the value of lane `lane`. All lanes of the warp must call it; if they name the same lane, the compiler knows
/// that the result is the same in all of them.
template <class T>
CUTE_DEVICE T of_lane(T const& value, int lane) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(int) == 0);
  int words[sizeof(T) / sizeof(int)];
  std::memcpy(words, &value, sizeof(T));
  CUTE_UNROLL
  for (int& word : words) word = __shfl_sync(0xffffffff, word, lane);
  T same;
  std::memcpy(&same, words, sizeof(T));
  return same;
}

}  // namespace flashtile
