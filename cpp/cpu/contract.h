// This file multiplies matrices in packed panels: C (rows, columns) = C·factor + A (rows, steps) · B (steps, columns),
// where `steps` is the index that is summed over.
//
// A step is one 32-bit word of A for each row and one row of words of B. In float32 arithmetic a word is one element;
// with bfloat16 dot products (Product::kPairs) it is two neighbours along the summed index.
#pragma once

#include <cstring>

#include "amx.h"
#include "flashtile/range.h"
#include "simd.h"

namespace flashtile::cpu {
namespace {

enum class Product { kFloats, kPairs };

constexpr int elements_per_step(Product product) {
  return product == Product::kPairs ? 2 : 1;
}

/// This says whether products are formed in tiles: see amx.h.
template <Product kProduct>
constexpr bool kUsesTiles = kHasTiles && kProduct == Product::kPairs;

/// Along the summed index A and B go on with zeros up to a multiple of this many elements.
template <Product kProduct>
constexpr int kStepPadding = elements_per_step(kProduct) * (kUsesTiles<kProduct> ? kTileWords : 1);

/// This says how A lies in memory: with a row's steps side by side, or with a step's rows side by side.
enum class Order { kRows, kSteps };

// A block of C stays in registers: rows × vectors accumulators, beside one row of vectors of B.
constexpr int kBlockVectors = kRegisters == 32 ? 4 : 2;
constexpr int kBlockRows = 6;
constexpr int kPanel = kBlockVectors * kLanes;

struct Contraction {
  const float* a;
  int a_stride;  // stride of rows or of steps: see Order
  const float* b;
  int b_stride;
  float* c;
  int c_stride;
  int rows;
  int columns;
  int steps;                      // count of elements along the summed index
  const float* factor = nullptr;  // factor of each row of C; null: 1
  bool accumulate = true;         // false: C counts as 0 before

  // In edge tiles these say what each row sees; both bounds grow with the row. Null: everything.
  const Range* columns_of_row = nullptr;  // C may be left unwritten elsewhere
  const Range* steps_of_row = nullptr;    // A is 0 elsewhere
};

FLASHTILE_INLINE int min(int a, int b) {
  return a < b ? a : b;
}

template <Product kProduct>
FLASHTILE_INLINE Vec multiply_add(Vec sum, Vec a, Vec b) {
  return kProduct == Product::kPairs ? dot_pairs(sum, a, b) : sum + a * b;
}

// These loops over a block of C are unrolled, so that the block lives in registers.
#define FLASHTILE_EACH_ROW _Pragma("GCC unroll 8") for (int i = 0; i < kRows; ++i)
#define FLASHTILE_EACH_VECTOR _Pragma("GCC unroll 8") for (int j = 0; j < kVectors; ++j)

template <Product kProduct, Order kOrder, int kRows, int kVectors>
void block(const Contraction& t, int row, int column, Range steps, const float* b) {
  Vec c[kRows][kVectors];
  FLASHTILE_EACH_ROW FLASHTILE_EACH_VECTOR c[i][j] = Vec{};
  const std::int64_t a_row = kOrder == Order::kRows ? t.a_stride : 1;
  const std::int64_t a_step = kOrder == Order::kRows ? 1 : t.a_stride;
  const std::int64_t b_step = t.b_stride;
  const float* a = t.a + row * a_row + steps.begin * a_step;
  b += steps.begin * b_step + column;
  for (int step = steps.begin; step < steps.end; ++step, a += a_step, b += b_step) {
    Vec b_row[kVectors];
    FLASHTILE_EACH_VECTOR b_row[j] = load(b + j * kLanes);
    FLASHTILE_EACH_ROW {
      const Vec word = splat(a[i * a_row]);
      FLASHTILE_EACH_VECTOR c[i][j] = multiply_add<kProduct>(c[i][j], word, b_row[j]);
    }
  }
  // The old value of C is added last: sums of tile sums round less than one chain through all tiles.
  const std::int64_t c_stride = t.c_stride;
  float* const target = t.c + row * c_stride + column;
  FLASHTILE_EACH_ROW {
    const float factor = t.factor != nullptr ? t.factor[row + i] : 1.0f;
    FLASHTILE_EACH_VECTOR {
      float* const at = target + i * c_stride + j * kLanes;
      store(at, t.accumulate ? load(at) * factor + c[i][j] : c[i][j]);
    }
  }
}

using Block = void (*)(const Contraction&, int row, int column, Range steps, const float* b);

/// Returns the function for a block of `rows` × `vectors`, which is one of the compiled sizes.
template <Product kProduct, Order kOrder, int kRows = kBlockRows, int kVectors = kBlockVectors>
Block find_block(int rows, int vectors) {
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return find_block<kProduct, kOrder, kRows, kVectors - 1>(rows, vectors);
  }
  if constexpr (kRows > 1) {
    if (rows < kRows) return find_block<kProduct, kOrder, kRows - 1, kVectors>(rows, vectors);
  }
  return block<kProduct, kOrder, kRows, kVectors>;
}

/// Does what block() does for as many tiles of rows and columns, 1 or 2, where A lies in rows.
template <int kRows, int kColumns>
void tile_block(const Contraction& t, int row, int column, Range words) {
  const std::int64_t a_stride = t.a_stride, b_stride = t.b_stride, c_stride = t.c_stride;
  const float* a = t.a + row * a_stride + words.begin;
  const float* b = t.b + words.begin * b_stride + column;
  clear_tile<0>();
  if constexpr (kColumns > 1) clear_tile<1>();
  if constexpr (kRows > 1) clear_tile<2>();
  if constexpr (kRows > 1 && kColumns > 1) clear_tile<3>();
  for (int word = words.begin; word < words.end; word += kTileWords) {
    load_tile<4>(a, a_stride);
    load_tile<6>(b, b_stride);
    multiply_tiles<0, 4, 6>();
    if constexpr (kColumns > 1) {
      load_tile<7>(b + kTileWords, b_stride);
      multiply_tiles<1, 4, 7>();
    }
    if constexpr (kRows > 1) {
      load_tile<5>(a + kTileRows * a_stride, a_stride);
      multiply_tiles<2, 5, 6>();
      if constexpr (kColumns > 1) multiply_tiles<3, 5, 7>();
    }
    a += kTileWords;
    b += kTileWords * b_stride;
  }
  const auto store_tiles = [](float* to, std::int64_t stride) {
    store_tile<0>(to, stride);
    if constexpr (kColumns > 1) store_tile<1>(to + kTileWords, stride);
    if constexpr (kRows > 1) store_tile<2>(to + kTileRows * stride, stride);
    if constexpr (kRows > 1 && kColumns > 1) store_tile<3>(to + kTileRows * stride + kTileWords, stride);
  };
  float* const target = t.c + row * c_stride + column;
  if (!t.accumulate) return store_tiles(target, c_stride);
  alignas(64) float sums[kRows * kTileRows][kColumns * kTileWords];
  store_tiles(sums[0], kColumns * kTileWords);
  const float* const factors = t.factor != nullptr ? t.factor + row : nullptr;
  const int rows = min(kRows * kTileRows, t.rows - row);
  for (int i = 0; i < rows; ++i) {
    const float factor = factors != nullptr ? factors[i] : 1.0f;
    for (int j = 0; j < kColumns * kTileWords; j += kLanes) {
      float* const at = target + i * c_stride + j;
      store(at, load(at) * factor + load(sums[i] + j));
    }
  }
}

/// Does what contract does, in blocks of up to 2 × 2 tiles. A and C have rows up to the next multiple of kTileRows;
/// those of C past the last are only written where C counts as 0 before.
inline void contract_tiles(const Contraction& t) {
  constexpr int kStepsOfTile = 2 * kTileWords;
  for (int row = 0; row < t.rows; row += 2 * kTileRows) {
    const int rows = min(2 * kTileRows, t.rows - row);
    Range words{0, (t.steps + kStepsOfTile - 1) / kStepsOfTile * kTileWords};
    if (t.steps_of_row != nullptr) {
      words.begin = t.steps_of_row[row].begin / kStepsOfTile * kTileWords;
      words.end = (t.steps_of_row[row + rows - 1].end + kStepsOfTile - 1) / kStepsOfTile * kTileWords;
    }
    for (int column = 0; column < t.columns; column += 2 * kTileWords) {
      if (t.columns_of_row != nullptr) {
        const int begin = t.columns_of_row[row].begin, end = t.columns_of_row[row + rows - 1].end;
        if (end <= column || begin >= column + 2 * kTileWords) continue;
      }
      const bool tall = rows > kTileRows, wide = t.columns - column > kTileWords;
      const auto block =
          tall ? (wide ? tile_block<2, 2> : tile_block<2, 1>) : (wide ? tile_block<1, 2> : tile_block<1, 1>);
      block(t, row, column, words);
    }
  }
}

/// Multiplies; it writes columns up to the next multiple of kLanes.
template <Product kProduct, Order kOrder>
void contract(const Contraction& t) {
  if constexpr (kUsesTiles<kProduct>) {
    static_assert(kOrder == Order::kRows);
    return contract_tiles(t);
  }
  constexpr int kPerStep = elements_per_step(kProduct);
  for (int column = 0; column < t.columns; column += kPanel) {
    const int vectors = min(kBlockVectors, (t.columns - column + kLanes - 1) / kLanes);
    for (int row = 0; row < t.rows; row += kBlockRows) {
      const int rows = min(kBlockRows, t.rows - row);
      if (t.columns_of_row != nullptr) {
        const int begin = t.columns_of_row[row].begin, end = t.columns_of_row[row + rows - 1].end;
        if (end <= column || begin >= column + kPanel) continue;
      }
      Range steps{0, (t.steps + kPerStep - 1) / kPerStep};
      if (t.steps_of_row != nullptr) {
        steps.begin = t.steps_of_row[row].begin / kPerStep;
        steps.end = (t.steps_of_row[row + rows - 1].end + kPerStep - 1) / kPerStep;
      }
      find_block<kProduct, kOrder>(rows, vectors)(t, row, column, steps, t.b);
    }
  }
}

/// Copies B as one row of C may see it: with 0 outside of `visible`.
template <Product kProduct>
void copy_visible(float* target, const Contraction& t, Range visible) {
  constexpr int kPerStep = elements_per_step(kProduct);
  const int steps = (t.steps + kStepPadding<kProduct> - 1) / kStepPadding<kProduct> * kStepPadding<kProduct>;
  for (int step = 0; step * kPerStep < steps; ++step) {
    const float* from = t.b + static_cast<std::int64_t>(step) * t.b_stride;
    float* to = target + static_cast<std::int64_t>(step) * t.b_stride;
    const int first = step * kPerStep, last = first + kPerStep - 1;
    const bool low = visible.begin <= first && first < visible.end;
    const bool high = visible.begin <= last && last < visible.end;
    // The low half of a word is the first element of a pair.
    const std::uint32_t keep = kPerStep == 1 ? (low ? ~0u : 0u) : (low ? 0x0000ffffu : 0u) | (high ? 0xffff0000u : 0u);
    for (int i = 0; i < t.columns; ++i) {
      std::uint32_t word;
      std::memcpy(&word, from + i, 4);
      word &= keep;
      std::memcpy(to + i, &word, 4);
    }
  }
}

/// Does what contract does for an edge tile whose B holds NaN or infinity: a row of C must not even multiply what it
/// does not see by 0. `shield` has room for B. The result is, bit for bit, that of contract where the hidden rows of B
/// are finite.
template <Product kProduct, Order kOrder>
void contract_shielded(const Contraction& t, float* shield) {
  for (int row = 0; row < t.rows; ++row) {
    copy_visible<kProduct>(shield, t, t.steps_of_row[row]);
    Contraction one = t;
    one.a += static_cast<std::int64_t>(row) * (kOrder == Order::kRows ? t.a_stride : 1);
    one.b = shield;
    one.c += static_cast<std::int64_t>(row) * t.c_stride;
    one.rows = 1;
    if (t.factor != nullptr) one.factor += row;
    one.steps_of_row += row;
    contract<kProduct, kOrder>(one);
  }
}

/// Returns whether no word (or half of one) is NaN or infinite.
template <Product kProduct>
bool all_finite(const float* words, std::int64_t count) {
  std::uint32_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, words + i, 4);
    found |= (word & 0x7f800000u) == 0x7f800000u;
    if (kProduct == Product::kPairs) found |= (word & 0x7f80u) == 0x7f80u;
  }
  return found == 0;
}

/// Calls contract, or contract_shielded where an edge tile needs it. B has t.b_stride words a step.
template <Product kProduct, Order kOrder>
void contract_visible(const Contraction& t, float* shield) {
  const std::int64_t b_words =
      static_cast<std::int64_t>((t.steps + elements_per_step(kProduct) - 1) / elements_per_step(kProduct)) * t.b_stride;
  if (t.steps_of_row == nullptr || all_finite<kProduct>(t.b, b_words)) {
    contract<kProduct, kOrder>(t);
  } else {
    contract_shielded<kProduct, kOrder>(t, shield);
  }
}

}  // namespace
}  // namespace flashtile::cpu
