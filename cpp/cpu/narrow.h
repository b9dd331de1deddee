// This file converts rows of a cache from numbers of 8 bits and to them.
#pragma once

#include <bit>

#include "kernels.h"
#include "pack.h"

namespace flashtile::cpu {
namespace {

/// An e4m3 number has four bits of exponent and three of mantissa; all ones are a NaN, and there is no infinity.
struct E4M3 {
  static constexpr int kMantissa = 3;
  static constexpr float kLeastNormal = 0x1p-6f;
  static constexpr float kLargest = 448;
  static constexpr std::uint32_t kFirstSpecial = 0x7f, kInfinity = 0x80;  // it has none
  std::uint8_t bits;
};

/// An e5m2 number is the upper half of a float16.
struct E5M2 {
  static constexpr int kMantissa = 2;
  static constexpr float kLeastNormal = 0x1p-14f;
  static constexpr float kLargest = 57344;
  static constexpr std::uint32_t kFirstSpecial = 0x7c, kInfinity = kFirstSpecial;
  std::uint8_t bits;
};

template <class Number>
FLASHTILE_INLINE float widen_number(Number x) {
  constexpr float kRebias = Number::kLeastNormal * 0x1p126f;  // as widen() of a float16 does
  const std::uint32_t magnitude = x.bits & 0x7fu, sign = (x.bits & 0x80u) << 24;
  const float finite = float_of(magnitude << (23 - Number::kMantissa)) * kRebias;
  const std::uint32_t special = magnitude == Number::kInfinity ? 0x7f800000u : 0x7fc00000u;
  return float_of((magnitude >= Number::kFirstSpecial ? special : bits_of(finite)) | sign);
}

/// Rounds to the nearest number, ties to even; what is beyond the largest becomes that.
template <class Number>
FLASHTILE_INLINE Number narrow_number(float x) {
  constexpr int kDropped = 23 - Number::kMantissa;
  constexpr std::uint32_t kRebias = std::bit_cast<std::uint32_t>(Number::kLeastNormal) - (1u << 23);
  const float given = float_of(bits_of(x) & 0x7fffffffu),
              magnitude = given < Number::kLargest ? given : Number::kLargest;
  const std::uint32_t bits = bits_of(magnitude);
  const std::uint32_t normal = (bits - kRebias + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1u)) >> kDropped;
  // Adding a number whose last bit is the least one of the format rounds to a multiple of that.
  constexpr float kShift = Number::kLeastNormal * static_cast<float>(1 << kDropped);
  const std::uint32_t subnormal = bits_of(magnitude + kShift) - bits_of(kShift);
  const std::uint32_t found = magnitude < Number::kLeastNormal ? subnormal : normal;
  return {static_cast<std::uint8_t>((x != x ? 0x7fu : found) | (bits_of(x) >> 24 & 0x80u))};
}

/// Rows of a cache, `stored` numbers, are widened to T: target = source · descale, rounded once.
template <class T, class Number>
void widen_numbers(void* target, const void* source, int width, float descale) {
  for (int i = 0; i < width; ++i)
    round_to(static_cast<T*>(target)[i], widen_number(static_cast<const Number*>(source)[i]) * descale);
}
template <class T>
void widen_row(void* target, const void* source, DType stored, int width, float descale) {
  (stored == DType::kE4M3 ? widen_numbers<T, E4M3> : widen_numbers<T, E5M2>)(target, source, width, descale);
}

/// Rounds target = source / descale; 0 / 0 counts as 0.
template <class T, class Number>
void narrow_numbers(void* target, const void* source, int width, float descale) {
  for (int i = 0; i < width; ++i) {
    const float x = widen(static_cast<const T*>(source)[i]);
    static_cast<Number*>(target)[i] = narrow_number<Number>(x == 0 ? x : x / descale);
  }
}
template <class T>
void narrow_row(void* target, const void* source, DType stored, int width, float descale) {
  (stored == DType::kE4M3 ? narrow_numbers<T, E4M3> : narrow_numbers<T, E5M2>)(target, source, width, descale);
}

/// Returns the descale with which the largest finite number of a row becomes the largest number of the format.
template <class T>
float descale_of_row(const void* row, DType stored, int width) {
  constexpr float kLeast = 0x1p-126f, kLargestFloat = 0x1.fffffep127f;
  float largest = 0;
  for (int i = 0; i < width; ++i) {
    const float magnitude = float_of(bits_of(widen(static_cast<const T*>(row)[i])) & 0x7fffffffu);
    if (magnitude <= kLargestFloat && magnitude > largest) largest = magnitude;
  }
  const float descale = largest / (stored == DType::kE4M3 ? E4M3::kLargest : E5M2::kLargest);
  return largest == 0 ? 0 : descale < kLeast ? kLeast : descale;
}

}  // namespace
}  // namespace flashtile::cpu
