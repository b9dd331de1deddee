// This file converts the caller's rows to the layouts that contract.h reads, and back: conversion, pairing,
// transposition.
#pragma once

#include <cstdint>
#include <cstring>

#include "contract.h"
#include "kernels.h"
#include "simd.h"

namespace flashtile::cpu {
namespace {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

constexpr int round_up(int x, int multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

FLASHTILE_INLINE std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
FLASHTILE_INLINE float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

FLASHTILE_INLINE float widen(float x) {
  return x;
}
FLASHTILE_INLINE float widen(BFloat16 x) {
  return float_of(static_cast<std::uint32_t>(x.bits) << 16);
}
FLASHTILE_INLINE float widen(Half x) {
  const std::uint32_t magnitude = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
  // 2^112 moves the exponent from half's bias to float's, subnormals included; infinity and NaN keep an exponent of all
  // ones.
  const float finite = float_of(magnitude << 13) * 0x1p112f;
  const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
  return float_of((magnitude >= 0x7c00u ? special : bits_of(finite)) | sign);
}

FLASHTILE_INLINE void round_to(float& target, float x) {
  target = x;
}
FLASHTILE_INLINE void round_to(BFloat16& target, float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  target.bits = static_cast<std::uint16_t>(x != x ? 0x7fc0u : nearest_even);
}
FLASHTILE_INLINE void round_to(Half& target, float x) {
  const std::uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  // Normal results are rebiased by −112 and rounded to nearest even; a carry into the exponent is right, up to
  // infinity.
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // For subnormal results, adding ½ leaves the multiple of 2^−24 in the low bits, rounded by the addition.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  target.bits = static_cast<std::uint16_t>(half | (bits >> 16 & 0x8000u));
}

/// This chooses the layouts of one dtype: pairs where the instruction set multiplies them, else floats.
template <class T>
constexpr Product kProductOf = Product::kFloats;
template <>
constexpr Product kProductOf<BFloat16> = kHasPairs ? Product::kPairs : Product::kFloats;

/// These are strides in words from row to row: of rows of `width` elements that are summed over, and of rows whose
/// columns stay apart.
template <Product kProduct>
constexpr int summed_stride(int width) {
  return round_up(width / elements_per_step(kProduct), kLanePadding);
}
constexpr int column_stride(int width) {
  return round_up(width, kLanePadding);
}

/// Keys of a tile are loaded, and their weights written, with zeros up to a multiple of this.
template <Product kProduct>
constexpr int kKeyPadding = kStepPadding<kProduct> > 2 ? kStepPadding<kProduct> : 2;

template <class T>
FLASHTILE_INLINE T* row_at(const HeadRows& rows, int row) {
  return static_cast<T*>(rows.data) + (rows.starts == nullptr ? row * rows.stride : rows.starts[row]);
}

/// Rows of a head lie a whole row of all heads apart, often a memory page, which hardware prefetchers do not foresee.
/// So rows are prefetched this many ahead.
constexpr int kRowsAhead = 8;

template <class T>
FLASHTILE_INLINE void prefetch(const T* row, int width) {
  constexpr int kOfLine = 64 / sizeof(T);
  for (int i = 0; i < width; i += kOfLine) __builtin_prefetch(row + i);
}

/// Loads the rows of `range` as words, side by side along the row, with zeros up to the stride. There are `rows` rows;
/// those past the last are zeros.
template <class T>
void load_rows(float* target, HeadRows source, int rows, int width, Range range) {
  constexpr Product kProduct = kProductOf<T>;
  const int stride = summed_stride<kProduct>(width), words = width / elements_per_step(kProduct);
  for (int row = range.begin; row < range.end; ++row, target += stride) {
    if (row >= rows) {
      for (int i = 0; i < stride; ++i) target[i] = 0;
      continue;
    }
    const T* const from = row_at<T>(source, row);
    prefetch(row_at<T>(source, min(row + kRowsAhead, rows - 1)), width);
    if constexpr (kProduct == Product::kPairs) {
      int i = 0;
      for (; i + kLanes <= words; i += kLanes) store(target + i, load(reinterpret_cast<const float*>(from) + i));
      if (i < stride) store(target + i, load_words(from + 2 * i, words - i));
    } else {
      for (int i = 0; i < width; ++i) target[i] = widen(from[i]);
      for (int i = width; i < stride; ++i) target[i] = 0;
    }
  }
}

/// Transposes (rows, words) to (words, rows); `rows` and `words` are padded to kLanes.
FLASHTILE_INLINE void transpose_words(float* target, int target_stride, const float* source, int source_stride,
                                      int rows, int words) {
  for (int row = 0; row < rows; row += kLanes) {
    for (int word = 0; word < words; word += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load(source + (row + i) * source_stride + word);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(target + (word + i) * target_stride + row, square[i]);
    }
  }
}

/// These are the words of a row of pairs.
struct Words {
  const void* data;
  int count;
};

/// Writes words that hold one column of two rows each, with zeros up to `stride`.
FLASHTILE_INLINE void pair_rows(float* target, Words low, Words high, int stride) {
  const auto at = [](Words row, int word) { return static_cast<const float*>(row.data) + word; };
  int word = 0;
  Vec first, second;
  for (; word + kLanes <= min(low.count, high.count); word += kLanes) {
    pair_halves(load(at(low, word)), load(at(high, word)), first, second);
    store(target + 2 * word, first);
    store(target + 2 * word + kLanes, second);
  }
  for (; 2 * word < stride; word += kLanes) {
    pair_halves(load_words(at(low, word), low.count - word), load_words(at(high, word), high.count - word), first,
                second);
    store(target + 2 * word, first);
    if (2 * word + kLanes < stride) store(target + 2 * word + kLanes, second);
  }
}

/// Returns rows in the order in which a matmul sums over them: for floats `source` itself; for pairs each word of
/// `target` holds one column of two neighbouring rows.
template <Product kProduct>
const float* steps_of(float* target, const float* source, int rows, int width) {
  if constexpr (kProduct == Product::kFloats) return source;
  const int source_stride = summed_stride<kProduct>(width), target_stride = column_stride(width);
  for (int row = 0; row < rows; row += 2, source += 2 * source_stride, target += target_stride)
    pair_rows(target, {source, width / 2}, {source + source_stride, width / 2}, target_stride);
  return target - rows / 2 * target_stride;
}

/// Loads `rows` rows in the order of steps_of, with zeros up to `padded_rows`.
template <class T>
void load_steps(float* target, HeadRows source, int rows, int width, int padded_rows) {
  if constexpr (kProductOf<T> == Product::kFloats) return load_rows<T>(target, source, rows, width, {0, padded_rows});
  const int stride = column_stride(width);
  for (int row = 0; row < padded_rows; row += 2, target += stride) {
    const auto words_of = [&](int at) {
      const T* const from = row_at<T>(source, min(at, rows - 1));
      prefetch(row_at<T>(source, min(at + kRowsAhead, rows - 1)), width);
      return Words{from, at < rows ? width / 2 : 0};
    };
    pair_rows(target, words_of(row), words_of(row + 1), stride);
  }
}

/// Stores target = factor · source, rounded to T.
template <class T>
FLASHTILE_INLINE void store_row(T* target, const float* source, int width, float factor) {
  for (int i = 0; i < width; ++i) round_to(target[i], factor * source[i]);
}

}  // namespace
}  // namespace flashtile::cpu
