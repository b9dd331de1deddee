// Which weights dropout removes is a function of the seed and of an element's coordinates (batch, head, row, column)
// alone. So every kernel, with any tile size, removes the same ones, and the backward recomputes which these are.
#pragma once

#include <cmath>
#include <cstdint>

#include "flashtile/macros.h"

namespace flashtile {

/// Philox 4×32-10 (Salmon, Moraes, Dror and Shaw 2011) makes four random words of a counter of four and a key of two.
struct Philox {
  std::uint32_t word[4];

  FLASHTILE_HOST_DEVICE static Philox of(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                                         std::uint64_t key) {
    auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t a = std::uint64_t{0xD2511F53} * c0, b = std::uint64_t{0xCD9E8D57} * c2;
      c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
      c1 = static_cast<std::uint32_t>(b);
      c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
      c3 = static_cast<std::uint32_t>(a);
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    return {{c0, c1, c2, c3}};
  }
};

/// Dropout removes a weight where its random word is below `drop_below`, and multiplies the others with `scale`.
///
/// Four elements whose rows and columns differ in bit 3 alone share the words of one Philox. In tiles that begin at
/// multiples of 16, one thread of a matmul mostly holds all four, whether rows are queries or keys: see Kept.
struct Dropout {
  std::uint64_t seed = 0;
  std::uint32_t drop_below = 0;  // 0 removes none
  float scale = 1;

  /// Removes each weight with `probability`, in [0, 1), which is rounded to the nearest multiple of 2^-32.
  static Dropout of(double probability, std::uint64_t seed) {
    constexpr double kWords = 4294967296.0;
    const double words = std::fmin(std::round(probability * kWords), kWords - 1);
    if (words == 0) return {};
    return {seed, static_cast<std::uint32_t>(words), static_cast<float>(kWords / (kWords - words))};
  }

  FLASHTILE_HOST_DEVICE bool active() const { return drop_below != 0; }

  /// Returns the words that query row `row` and key `column` share with three other elements. keeps() picks one by bit
  /// 3 of the row, `query_8`, and of the key, `key_8`.
  FLASHTILE_HOST_DEVICE Philox words(int batch, int head, int row, int column) const {
    return Philox::of(std::uint32_t(row & ~8), std::uint32_t(column & ~8), std::uint32_t(head), std::uint32_t(batch),
                      seed);
  }
  FLASHTILE_HOST_DEVICE bool keeps(Philox const& words, bool query_8, bool key_8) const {
    const std::uint32_t of_key = query_8 ? words.word[1] : words.word[0];
    const std::uint32_t of_key_8 = query_8 ? words.word[3] : words.word[2];
    return (key_8 ? of_key_8 : of_key) >= drop_below;  // an array indexed at run time would leave the registers
  }
  FLASHTILE_HOST_DEVICE bool keeps(int batch, int head, int row, int column) const {
    return keeps(words(batch, head, row, column), (row & 8) != 0, (column & 8) != 0);
  }

  bool operator==(const Dropout&) const = default;
};

}  // namespace flashtile
