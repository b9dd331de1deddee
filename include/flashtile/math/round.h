// float32 to the element type of a tensor, two at a time: one instruction.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace flashtile {

template <class Element>
CUTE_DEVICE std::uint32_t round_pair(float low, float high) {
  const auto pair = cutlass::NumericArrayConverter<Element, float, 2>::convert({low, high});
  return reinterpret_cast<std::uint32_t const&>(pair);
}

/// `to` ← `from`, element by element; both in registers, both of the same even size.
template <class From, class To>
CUTE_DEVICE void round_to(From const& from, To&& to) {
  using namespace cute;
  using Element = typename std::decay_t<To>::value_type;
  auto words = recast<std::uint32_t>(to);
  CUTE_UNROLL
  for (int i = 0; i < size(words); ++i) words(i) = round_pair<Element>(from(2 * i), from(2 * i + 1));
}

}  // namespace flashtile
