// This file defines a SIMD register of floats, as wide as the instruction set that the including file is compiled for.
//
// kernels.cpp is compiled once per instruction set, each time in another namespace. Everything it uses has internal
// linkage, because the linker keeps one copy of an inline function and it may keep the one of the wrong set.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace flashtile::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__x86_64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#endif

#define FLASHTILE_INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t IntVec __attribute__((vector_size(4 * kLanes)));
// This is the same register in memory, at any address and over any type.
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

FLASHTILE_INLINE Vec load(const float* p) {
  return *reinterpret_cast<const LooseVec*>(p);
}
FLASHTILE_INLINE void store(float* p, Vec v) {
  *reinterpret_cast<LooseVec*>(p) = v;
}
FLASHTILE_INLINE Vec splat(float x) {
  return x - Vec{};  // x − 0 is x for every x, −0 and NaN too
}
FLASHTILE_INLINE IntVec iota() {
  IntVec v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}
FLASHTILE_INLINE Vec abs(Vec x) {
  return (Vec)((IntVec)x & 0x7fffffff);
}

/// Returns a where it is the greater, else b: also where a is NaN.
FLASHTILE_INLINE Vec max_or_second(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

/// Returns a where it is the smaller, else b: also where a is NaN.
FLASHTILE_INLINE Vec min_or_second(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

/// Returns whether any lane of a comparison holds.
FLASHTILE_INLINE bool any(IntVec lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)lanes) != 0;
#else
  using Halves = std::int64_t __attribute__((vector_size(16)));
  const Halves halves = (Halves)lanes;
  return (halves[0] | halves[1]) != 0;
#endif
}

/// Returns 2^(x · factor) within 1 ulp of that of the rounded product, which is at most 127. Results below 2^−126 may
/// be 0, 2^−inf is 0, and NaN stays NaN.
FLASHTILE_INLINE Vec exp2(Vec x, float factor = 1) {
  x *= factor;
#if defined(__AVX512F__)
  const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // Adding 1.5 · 2^23 leaves the nearest whole number in the low bits.
  const Vec shifted = x + 12582912.0f;
  const Vec whole = shifted - 12582912.0f;
#endif
  const Vec r = x - whole;  // in [−½, ½]; NaN where the product is −inf
  // This is a minimax polynomial for 2^r with constant term 1: its relative error is 2e-9, below float's.
  Vec p = splat(1.5353362e-4f);
  p = p * r + 1.3398875e-3f;
  p = p * r + 9.61843692e-3f;
  p = p * r + 5.55033237e-2f;
  p = p * r + 2.40226477e-1f;
  p = p * r + 6.93147182e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, whole);  // VSCALEFPS of a quiet NaN and −inf is 0 by definition
#else
  const Vec power = (Vec)(((IntVec)shifted << 23) + 0x3f800000);
  return whole < -126.0f ? Vec{} : p * power;  // not a test of x, so that the product can be part of FMAs
#endif
}

/// Rounds x ≥ 0 to the nearest multiple of 2^−3 of its power of two, or of 2^−9, ties to even: up to 448 these are the
/// numbers of e4m3.
FLASHTILE_INLINE Vec round_to_e4m3(Vec x) {
  const Vec power = max_or_second((Vec)((IntVec)x & 0x7f800000), splat(0x1p-6f));
  const Vec shift = power * 0x1p20f;  // whose last bit is 2^−3 of the power
  return (x + shift) - shift;
}

/// Returns tanh within 2 ulp.
FLASHTILE_INLINE Vec tanh(Vec x) {
  const Vec y = abs(x);
  // This is a minimax polynomial for (tanh(y) − y) / y³, y < 0.625: the relative error of tanh is 4e-9.
  const Vec z = y * y;
  Vec p = splat(-5.70498547e-3f);
  p = p * z + 2.06390861e-2f;
  p = p * z - 5.37397154e-2f;
  p = p * z + 1.33314416e-1f;
  p = p * z - 3.33332807e-1f;
  const Vec small = y + y * z * p;
  const Vec capped = y > 20.0f ? splat(20.0f) : y;  // tanh(20) is 1 in float; NaN passes
  const Vec large = 1.0f - 2.0f / (exp2(capped * 2.88539008f) + 1.0f);
  const Vec magnitude = y < 0.625f ? small : large;
  return (Vec)((IntVec)magnitude | ((IntVec)x & (IntVec)splat(-0.0f)));
}

#if defined(__clang__)
#define FLASHTILE_ZIP_LOW(a, b) __builtin_shufflevector(a, b, FLASHTILE_ZIP_LOW_LANES)
#define FLASHTILE_ZIP_HIGH(a, b) __builtin_shufflevector(a, b, FLASHTILE_ZIP_HIGH_LANES)
#else
#define FLASHTILE_ZIP_LOW(a, b) __builtin_shuffle(a, b, IntVec{FLASHTILE_ZIP_LOW_LANES})
#define FLASHTILE_ZIP_HIGH(a, b) __builtin_shuffle(a, b, IntVec{FLASHTILE_ZIP_HIGH_LANES})
#endif
#if defined(__AVX512F__)
#define FLASHTILE_ZIP_LOW_LANES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define FLASHTILE_ZIP_HIGH_LANES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define FLASHTILE_ZIP_LOW_LANES 0, 8, 1, 9, 2, 10, 3, 11
#define FLASHTILE_ZIP_HIGH_LANES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FLASHTILE_ZIP_LOW_LANES 0, 4, 1, 5
#define FLASHTILE_ZIP_HIGH_LANES 2, 6, 3, 7
#endif

/// Transposes a square of kLanes registers: each stage interleaves row i with row i + kLanes / 2.
FLASHTILE_INLINE void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = FLASHTILE_ZIP_LOW(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = FLASHTILE_ZIP_HIGH(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

/// Returns acc + a.low · b.low + a.high · b.high, where a register holds two bfloat16 in each 32-bit lane.
FLASHTILE_INLINE Vec dot_pairs(Vec acc, Vec a, Vec b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

/// Returns 32 consecutive bfloat16 out of two registers of floats.
FLASHTILE_INLINE Vec narrow(Vec first, Vec second) {
  return (Vec)_mm512_cvtne2ps_pbh(second, first);
}

/// Returns the 32 halves of `v` in the order 0, 16, 1, 17, …: this turns narrow(low, high) into lanes (low, high).
FLASHTILE_INLINE Vec interleave_halves(Vec v) {
  const IntVec order = iota() | ((iota() + 16) << 16);
  return (Vec)_mm512_permutexvar_epi16((__m512i)order, (__m512i)v);
}

/// Loads the first `count` of 16 words; the others become 0, and their memory is not read.
FLASHTILE_INLINE Vec load_words(const void* p, int count) {
  const unsigned mask = count >= kLanes ? 0xffffu : (1u << (count > 0 ? count : 0)) - 1;
  return (Vec)_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), p);
}

/// Pairs the 32 halves of `low` with those of `high`: words (low[0], high[0]), … go to `first`, those from half 16 on
/// to `second`.
FLASHTILE_INLINE void pair_halves(Vec low, Vec high, Vec& first, Vec& second) {
  // Instructions that interleave do so within quarters of a register, so quarters get what they shall interleave: four
  // halves of the first 16, then four of the others.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i a = _mm512_permutexvar_epi64(order, (__m512i)low), b = _mm512_permutexvar_epi64(order, (__m512i)high);
  first = (Vec)_mm512_unpacklo_epi16(a, b);
  second = (Vec)_mm512_unpackhi_epi16(a, b);
}
#else
constexpr bool kHasPairs = false;
FLASHTILE_INLINE Vec dot_pairs(Vec acc, Vec, Vec) {
  return acc;
}
FLASHTILE_INLINE Vec narrow(Vec first, Vec) {
  return first;
}
FLASHTILE_INLINE Vec interleave_halves(Vec v) {
  return v;
}
FLASHTILE_INLINE Vec load_words(const void*, int) {
  return Vec{};
}
FLASHTILE_INLINE void pair_halves(Vec low, Vec high, Vec& first, Vec& second) {
  first = low;
  second = high;
}
#endif

}  // namespace
}  // namespace flashtile::cpu
