// What the lanes of a warp tell each other.
#pragma once

#include <cstring>
#include <cute/config.hpp>
#include <type_traits>

namespace flashtile {

/// The value that a lane has, in all lanes of the warp, which all ask: so the compiler knows it to be the same.
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
