// These functions round float32 to the element type of a tensor, two numbers in one instruction.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace flashtile {

template <class Element>
CUTE_DEVICE std::uint32_t round_pair(float low, float high) {
  const auto pair = cutlass::NumericArrayConverter<Element, float, 2>::convert({low, high});
  return reinterpret_cast<std::uint32_t const&>(pair);
}

/// Returns the pair that round_pair made, as float32.
template <class Element>
CUTE_DEVICE float2 unround(std::uint32_t pair) {
  if constexpr (std::is_same_v<Element, cute::half_t>)
    return __half22float2(reinterpret_cast<__half2 const&>(pair));
  else
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

/// Negative says what becomes of negative numbers. To make them 0 costs nothing: the same instruction does it.
enum class Negative { kKeep, kZero };

template <class Element, Negative kNegative>
CUTE_DEVICE std::uint32_t round_pair(float low, float high) {
  if constexpr (kNegative == Negative::kKeep) return round_pair<Element>(low, high);
  std::uint32_t word;
  if constexpr (std::is_same_v<Element, cute::half_t>)
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

/// Rounds `from` to `to`, element by element. Both are in registers and have the same even size.
template <Negative kNegative = Negative::kKeep, class From, class To>
CUTE_DEVICE void round_to(From const& from, To&& to) {
  using namespace cute;
  using Element = typename std::decay_t<To>::value_type;
  auto words = recast<std::uint32_t>(to);
  CUTE_UNROLL
  for (int i = 0; i < size(words); ++i) words(i) = round_pair<Element, kNegative>(from(2 * i), from(2 * i + 1));
}

}  // namespace flashtile
