// Which weights dropout removes is a function of the seed and of an element's coordinates (batch, head, row, column)
// alone. So every kernel, with any tile size, removes the same ones, and the backward recomputes which these are.
#pragma once

#include <cmath>
#include <cstdint>

#include "flashtile/macros.h"

namespace flashtile {

/// Philox 4×32 (Salmon, Moraes, Dror and Shaw 2011) makes four random words of a counter of four and a key of two.
struct Philox {
  std::uint32_t word[4];

  template <int kRounds>
  FLASHTILE_HOST_DEVICE static Philox of(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                                         std::uint64_t key) {
    auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t a = product(0xD2511F53, c0), b = product(0xCD9E8D57, c2);
      c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
      c1 = static_cast<std::uint32_t>(b);
      c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
      c3 = static_cast<std::uint32_t>(a);
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    return {{c0, c1, c2, c3}};
  }

 private:
  FLASHTILE_HOST_DEVICE static std::uint64_t product(std::uint32_t x, std::uint32_t y) {
#ifdef __CUDA_ARCH__
    std::uint64_t xy;  // the compiler multiplies the upper halves of operands of 64 bits though they are 0
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(xy) : "r"(x), "r"(y));
    return xy;
#else
    return std::uint64_t{x} * y;
#endif
  }
};

/// BytesAtLeast compares the four bytes of a word with a number from 0 to 255 at once.
struct BytesAtLeast {
  std::uint32_t addend, either;

  FLASHTILE_HOST_DEVICE explicit BytesAtLeast(std::uint32_t number)
      : addend((number <= 128 ? 128 - number : 256 - number) * 0x01010101u), either(number <= 128 ? ~0u : 0) {}

  /// Returns a word whose bytes have their top bit set where those of `word` are at least the number. The sum says it
  /// of the low seven bits, and no byte of it carries into the next; a byte's top bit alone is 128. Other bits are
  /// random.
  FLASHTILE_HOST_DEVICE std::uint32_t operator()(std::uint32_t word) const {
    const std::uint32_t sum = (word & 0x7f7f7f7f) + addend;
    return (sum & word) | ((sum | word) & either);
  }
};

/// A place is where an element of the scores lies in a larger call, of which this one is a part.
struct Place {
  int batch = 0, head = 0;
  int row = 0, column = 0;  // multiples of 16

  bool operator==(const Place&) const = default;
};

/// Dropout removes a weight where its random byte is below `drop_below`, and multiplies the others with `scale`.
///
/// Sixteen elements whose rows and columns differ in bits 0 and 3 alone share the words of one Philox, a byte each. A
/// thread of a matmul holds eight of them, all bytes of two words, whether rows are queries or keys: see DropoutTile.
struct Dropout {
  /// So many rounds are the fewest that pass all tests of BigCrush (Salmon et al., table 2).
  static constexpr int kRounds = 7;
  static constexpr int kShared = 9;  // the bits of a row and a column in which those who share words differ

  std::uint64_t seed = 0;
  std::uint32_t drop_below = 0;  // 0 removes none
  float scale = 1;
  Place first;  // of the call's first element, if it is a part of a larger one

  /// Removes each weight with `probability`, in [0, 1), which is rounded to the nearest multiple of 1/256; but what is
  /// above 0 remains so, and below 1.
  static Dropout of(double probability, std::uint64_t seed, Place first = {}) {
    if (!(probability > 0)) return {};
    const double bytes = std::fmin(std::fmax(std::round(probability * 256), 1), 255);
    return {seed, static_cast<std::uint32_t>(bytes), static_cast<float>(256 / (256 - bytes)), first};
  }

  FLASHTILE_HOST_DEVICE bool active() const { return drop_below != 0; }

  /// Returns where a tile of keys may begin that has `column` in it: see DropoutTile.
  FLASHTILE_HOST_DEVICE int tile_begin(int column) const { return active() ? column & ~15 : column; }

  /// Returns the words that query row `row` and key `column` share with fifteen other elements.
  FLASHTILE_HOST_DEVICE Philox words(int batch, int head, int row, int column) const {
    return Philox::of<kRounds>(std::uint32_t(first.row + (row & ~kShared)),
                               std::uint32_t(first.column + (column & ~kShared)), std::uint32_t(first.head + head),
                               std::uint32_t(first.batch + batch), seed);
  }
  /// Returns the index of an element's word among these, and of its byte in the word, the lowest being 0.
  FLASHTILE_HOST_DEVICE static constexpr int word_of(int row, int column) { return (row & 1) + 2 * (column & 1); }
  FLASHTILE_HOST_DEVICE static constexpr int byte_of(int row, int column) {
    return (row >> 3 & 1) + 2 * (column >> 3 & 1);
  }
  FLASHTILE_HOST_DEVICE bool keeps(Philox const& words, int row, int column) const {
    return (words.word[word_of(row, column)] >> 8 * byte_of(row, column) & 0xff) >= drop_below;
  }
  FLASHTILE_HOST_DEVICE bool keeps(int batch, int head, int row, int column) const {
    return keeps(words(batch, head, row, column), row, column);
  }

  bool operator==(const Dropout&) const = default;
};

}  // namespace flashtile
