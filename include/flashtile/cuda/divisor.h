// A Divisor is a number known to the host: a kernel divides by it with a multiplication, in a tenth of the time.
#pragma once

#include <bit>
#include <cstdint>

#include "flashtile/macros.h"

namespace flashtile {

/// For dividends from 0 up to 2^31, x / value is x · multiplier / 2^(32 + shift), rounded down. The multiplier is
///  2^(31 + ⌈log2 value⌉) / value, rounded up, so that the quotient is off by less than 1 / value.
struct Divisor {
  int value = 1;
  std::uint32_t multiplier = 0;  // 0 if value is 1
  int shift = 0;

  Divisor() = default;
  /// Makes the divisor `of`, or 1 if `of` is below that.
  explicit Divisor(int of) {
    if (of <= 1) return;
    const int log2 = std::bit_width(static_cast<unsigned>(of - 1));
    const std::uint64_t power = std::uint64_t{1} << (31 + log2);
    const auto divisor = static_cast<std::uint64_t>(of);
    value = of;
    multiplier = static_cast<std::uint32_t>((power + divisor - 1) / divisor);
    shift = log2 - 1;
  }

  FLASHTILE_HOST_DEVICE int quotient(int x) const {
    return multiplier == 0 ? x : int(std::uint64_t(unsigned(x)) * multiplier >> 32 >> shift);
  }
  FLASHTILE_HOST_DEVICE int remainder(int x) const { return x - quotient(x) * value; }
  bool operator==(const Divisor&) const = default;
};

}  // namespace flashtile
