// This file makes keys and values of 8 bits operands of matmuls of 16 bits (mma.sync), in registers.
//
// ldmatrix moves units of 16 bits, here pairs of numbers. A thread gets four neighbouring numbers of a key, where two
// and two further ones would be its share of numbers of 16 bits: so Q has its columns in that order too, which changes
// no score. And of values it gets two neighbouring columns of a key in a unit, of which one matmul takes the first and
// another the second: so their columns of O are the even and the odd ones of 16.
#pragma once

#include <cutlass/float8.h>
#include <cutlass/half.h>

#include <cute/tensor.hpp>

#include "flashtile/math/round.h"

namespace flashtile {

/// These are two pairs of float16.
struct TwoPairs {
  std::uint32_t first, second;
};

/// Widens four numbers of 8 bits, exactly: infinities and NaN stay what they are.
template <class Stored>
CUTE_DEVICE TwoPairs widen(std::uint32_t four) {
  if constexpr (std::is_same_v<Stored, cutlass::float_e5m2_t>) {  // the upper half of a float16
    return {__byte_perm(0, four, 0x5140), __byte_perm(0, four, 0x7160)};
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    TwoPairs wide;
    asm("{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(wide.first), "=r"(wide.second)
        : "r"(four));
    return wide;
#else
    // A float16 with the exponent's and mantissa's bits of an e4m3 number is 2^8 times less than that, subnormal ones
    // too. A NaN has all these bits set: adding one to them carries into the exponent's highest bit.
    const std::uint32_t magnitude = four & 0x7f7f7f7fu;
    const std::uint32_t bits = magnitude | ((magnitude + 0x01010101u) & 0x80808080u);
    const auto pair = [&](std::uint32_t order) {
      const std::uint32_t sign = __byte_perm(four, 0, order) & 0x80008000u;
      const std::uint32_t word = sign | (__byte_perm(bits, 0, order) >> 1);
      const __half2 wide = __hmul2(reinterpret_cast<__half2 const&>(word), __float2half2_rn(256));
      return reinterpret_cast<std::uint32_t const&>(wide);
    };
    return {pair(0x1404), pair(0x3424)};
#endif
  }
}

/// Returns the power of two by which a positive x comes to lie from 2^kTo on and below 2^(kTo + 1), or as near to that
/// as an inverse allows that is no subnormal number.
template <int kTo>
CUTE_DEVICE float power_to(float x) {
  return __uint_as_float(std::uint32_t(min(254 + kTo - int(__float_as_uint(x) >> 23), 253)) << 23);
}
CUTE_DEVICE float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

/// Makes rows of Q float16 in the order of the keys' columns: `rows` of those that one warp has, 16 or 8, from
/// `first_row` on.
/// Each is multiplied with a power of two that brings its largest element to 2^14, so that what is too small for
/// float16 counts for nothing beside that; `factors` get the inverses, by row.
template <class Given, class Tile>
CUTE_DEVICE void prepare_queries(Tile const& sQ, int first_row, int rows, float* factors) {
  using namespace cute;
  constexpr int kRows = size<0>(decltype(sQ.layout()){}) < 16 ? 8 : 16;
  constexpr int kLanes = size<1>(decltype(sQ.layout()){}) / 16;  // of a row: each has 16 columns
  const int lane = threadIdx.x % 32, column = lane % kLanes * 16;
  if (lane < kRows) factors[first_row + lane] = 1;  // rows that do not count are 0
  __syncwarp();
  CUTE_NO_UNROLL
  for (int r = lane / kLanes; r < rows + lane / kLanes; r += 32 / kLanes) {  // as often in all lanes
    const int row = first_row + min(r, kRows - 1);
    const auto chunk = [&](int i) -> uint4& {
      return *reinterpret_cast<uint4*>(raw_pointer_cast(&sQ(row, column + 8 * i)));
    };
    const uint4 a = chunk(0), b = chunk(1);
    float largest = 0;
    for (const std::uint32_t word : {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}) {
      const float2 pair = unround<Given>(word);
      largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));  // which ignores NaN
    }
    CUTE_UNROLL
    for (int distance = 1; distance < kLanes; distance *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    const float power = power_to<14>(largest);
    const auto prepared = [&](std::uint32_t word) {
      const float2 pair = unround<Given>(word);
      return round_pair<cutlass::half_t>(pair.x * power, pair.y * power);
    };
    chunk(0) = {prepared(a.x), prepared(a.z), prepared(b.x), prepared(b.z)};
    chunk(1) = {prepared(a.y), prepared(a.w), prepared(b.y), prepared(b.w)};
    if (column == 0) factors[row] = inverse_of_power(power);
  }
  __syncwarp();
}

/// Makes the operand of 16 columns of keys from that of 32, `units` ((2, 2), n): the first or the second half of them.
template <class Stored, class Units, class Operand>
CUTE_DEVICE void widen_keys(Units const& units, int half, Operand&& operand) {
  using namespace cute;
  Tensor from = recast<std::uint32_t>(units);
  Tensor to = recast<std::uint32_t>(operand);
  CUTE_UNROLL
  for (int n = 0; n < size<1>(to); ++n) {
    const TwoPairs wide = widen<Stored>(from(half, n));
    to(0, n) = wide.first;
    to(1, n) = wide.second;
  }
}

/// Widens two neighbouring numbers of each of two values: the pair of the first ones, and that of the second ones.
template <class Stored>
CUTE_DEVICE TwoPairs widen_values(std::uint32_t four) {
  return widen<Stored>(__byte_perm(four, 0, 0x3120));
}

/// Makes the operand of 16 values, ((2, 2), columns / 8), from that of their units, ((2, 2), columns / 16): even
/// columns of 16, then the odd ones.
template <class Stored, class Units, class Operand>
CUTE_DEVICE void widen_values(Units const& units, Operand&& operand) {
  using namespace cute;
  Tensor from = recast<std::uint32_t>(units);
  Tensor to = recast<std::uint32_t>(operand);
  CUTE_UNROLL
  for (int n = 0; n < size<1>(from); ++n) CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const TwoPairs wide = widen_values<Stored>(from(i, n));
    to(i, 2 * n) = wide.first;
    to(i, 2 * n + 1) = wide.second;
  }
}

/// DescaledValues are weights times the descales of their values, where each row of a cache has one. What they sum up
/// is in units of a power of two, so that the weights keep within float16: those of a block whose largest descale it
/// is.
struct DescaledValues {
  float unit = 0;
  float to_unit = 0;

  /// Goes on to a block of kN keys with these descales. Returns what sums so far have to be multiplied with.
  template <int kN>
  CUTE_DEVICE float begin(const float* descales) {
    float largest = 0;
    CUTE_UNROLL
    for (int key = 0; key < kN; key += 16) largest = fmaxf(largest, fabsf(descales[key + threadIdx.x % 16]));
    CUTE_UNROLL
    for (int distance = 1; distance < 16; distance *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    // Weights may be 2^8, and float16 ends at 2^16. No unit is so much less than the last one that sums overflow.
    const float unit_before = unit;
    unit = fmaxf(inverse_of_power(power_to<6>(largest)), unit_before * 0x1p-64f);
    to_unit = inverse_of_power(unit);
    return unit_before * to_unit;
  }

  /// Multiplies the weights (row, column) of 16 keys with `descales`.
  template <class Weights>
  CUTE_DEVICE void multiply(Weights&& weights, const float* descales) const {
    using namespace cute;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(weights); c += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(descales + threadIdx.x % 4 * 2 + 4 * c);
      CUTE_UNROLL
      for (int r = 0; r < size<0>(weights); ++r) {
        weights(r, c) *= pair.x * to_unit;
        weights(r, c + 1) *= pair.y * to_unit;
      }
    }
  }
};

}  // namespace flashtile
