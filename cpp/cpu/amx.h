// This file holds AMX's tiles: eight registers of 16 rows × 64 bytes, and an instruction that adds the product of two
// of them to a third.
//
// Of A a tile holds 16 rows × 16 words, of B 16 words × 16 columns, of C 16 × 16 floats, where a word is two bfloat16
// along the summed index. These are the layouts of Product::kPairs, so tiles are loaded from the buffers as they lie.
//
// Tests of this code run on machines without AMX too: there FLASHTILE_EMULATE_AMX replaces the instructions.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace flashtile::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileWords = 16;  // words or floats of a row

/// While one of these lives that uses tiles, the thread's tiles are ours: other libraries in the process configure
/// them, too.
template <bool kUsed>
class TileScope {};

#if defined(FLASHTILE_EMULATE_AMX)
constexpr bool kHasTiles = true;

thread_local Vec emulated[8][kTileRows];
thread_local bool tiles_are_configured = false;

/// The instructions take and give subnormals as 0.
FLASHTILE_INLINE Vec flush(Vec x) {
  return abs(x) < 0x1p-126f ? Vec{} : x;
}

template <>
class TileScope<true> {
 public:
  TileScope() {
    // A tile holds nothing before it is loaded; NaN shows in the results of a kernel that forgets it.
    std::memset(emulated, 0xff, sizeof(emulated));
    tiles_are_configured = true;
  }
  ~TileScope() { tiles_are_configured = false; }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

/// These three trap as the instructions do where no configuration is loaded.
template <int kTile>
FLASHTILE_INLINE void load_tile(const float* from, std::int64_t stride) {
  if (!tiles_are_configured) __builtin_trap();
  for (int row = 0; row < kTileRows; ++row) emulated[kTile][row] = load(from + row * stride);
}
template <int kTile>
FLASHTILE_INLINE void store_tile(float* to, std::int64_t stride) {
  if (!tiles_are_configured) __builtin_trap();
  for (int row = 0; row < kTileRows; ++row) store(to + row * stride, emulated[kTile][row]);
}
template <int kTile>
FLASHTILE_INLINE void clear_tile() {
  if (!tiles_are_configured) __builtin_trap();
  for (int row = 0; row < kTileRows; ++row) emulated[kTile][row] = Vec{};
}

/// Adds in the order of the instruction's description: products of low and of high halves are summed apart, each from
/// 0, and then together.
template <int kC, int kA, int kB>
FLASHTILE_INLINE void multiply_tiles() {
  const auto low = [](Vec words) { return flush((Vec)((IntVec)words << 16)); };
  const auto high = [](Vec words) { return flush((Vec)((IntVec)words & ~0xffff)); };
  for (int row = 0; row < kTileRows; ++row) {
    Vec of_low{}, of_high{};
    for (int word = 0; word < kTileWords; ++word) {
      const Vec a = splat(emulated[kA][row][word]), b = emulated[kB][word];
      of_low = flush(of_low + low(a) * low(b));
      of_high = flush(of_high + high(a) * high(b));
    }
    emulated[kC][row] = flush(emulated[kC][row] + flush(of_low + of_high));
  }
}
#elif defined(__AMX_BF16__)
constexpr bool kHasTiles = true;

template <>
class TileScope<true> {
 public:
  TileScope() {
    static constexpr Configuration kWholeTiles{};
    __asm__ volatile("ldtilecfg %0" ::"m"(kWholeTiles));
  }
  /// Released tiles need not be saved when the system switches threads.
  ~TileScope() { __asm__ volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  struct alignas(64) Configuration {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Configuration) == 64);
};

// GCC's intrinsics take a tile's number only as a literal, and GCC 12's do not say that loads read memory.
template <int kTile>
FLASHTILE_INLINE void load_tile(const float* from, std::int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(4 * stride), "i"(kTile) : "memory");
}
template <int kTile>
FLASHTILE_INLINE void store_tile(float* to, std::int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(4 * stride), "i"(kTile) : "memory");
}
template <int kTile>
FLASHTILE_INLINE void clear_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kC, int kA, int kB>
FLASHTILE_INLINE void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
#else
constexpr bool kHasTiles = false;

template <int kTile>
FLASHTILE_INLINE void load_tile(const float*, std::int64_t) {}
template <int kTile>
FLASHTILE_INLINE void store_tile(float*, std::int64_t) {}
template <int kTile>
FLASHTILE_INLINE void clear_tile() {}
template <int kC, int kA, int kB>
FLASHTILE_INLINE void multiply_tiles() {}
#endif

}  // namespace
}  // namespace flashtile::cpu
