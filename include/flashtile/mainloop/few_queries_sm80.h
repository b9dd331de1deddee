// This mainloop takes a tile of 8 query rows, by one warp, against 8-bit keys of its own: a group of heads while new
// tokens are decoded.
//
// The rows of the matmuls of mma.sync are 16 keys here, or 16 columns of V, and their columns are the 8 queries:
// S^T = K·Q^T and O^T = V^T·P^T. So no half of a matmul, of a score's exponential and of an accumulator is for rows
// that are not there, and all of Q stays in registers. The ring of keys and values, and the masks, are those of
// ForwardMainloopSm80.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/mainloop/forward_sm80.h"

namespace flashtile {

template <class Ring>
struct FewQueriesSm80 {
  static constexpr int kN = Ring::kN;
  static constexpr int kHeadDim = Ring::kHeadDim;
  static constexpr int kQuerySteps = kHeadDim / 16;  // columns that a matmul sums over
  static constexpr int kTiles = kHeadDim / 16;       // of O^T: even columns of 32, and the odd ones
  using Stored = typename Ring::Stored;
  using Softmax = typename Ring::Softmax;
  using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;
  static_assert(Ring::kFew && Ring::kFp8 && Ring::kLoadedAhead > 0);

  /// A thread's scores, and its part of O^T, are those of two queries, and of every eighth key or unit of columns.
  using Rows = cute::Int<2>;
  template <int kTilesOf16>
  using Accumulator = cute::Layout<cute::Shape<Rows, cute::Shape<cute::_2, cute::Int<kTilesOf16>>>,
                                   cute::Stride<cute::_1, cute::Stride<cute::_2, cute::_4>>>;
  using Out = decltype(cute::make_tensor<float>(Accumulator<kTiles>{}));

  /// The coordinates (query, key) of a thread's scores within a block.
  struct Coordinates {
    int lane;
    CUTE_DEVICE auto operator()(int r, int c) const { return cute::make_tuple(lane % 4 * 2 + r, lane / 4 + 8 * c); }
  };

  Ring ring;

  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }

  /// Loads four matrices of 8 × 8 units, of which each lane says where a row is.
  CUTE_DEVICE static void load(std::uint32_t (&words)[4], const void* row) {
    cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), words[0], words[1], words[2], words[3]);
  }
  /// Does the same of matrices whose rows and columns are exchanged.
  CUTE_DEVICE static void load_transposed(std::uint32_t (&words)[4], const void* row) {
    cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(row), words[0], words[1], words[2], words[3]);
  }
  CUTE_DEVICE static std::uint32_t transposed(std::uint32_t word) {
    std::uint32_t other;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(word));
    return other;
  }
  CUTE_DEVICE static void multiply(float* sums, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                   std::uint32_t b0, std::uint32_t b1) {
    Mma::fma(sums[0], sums[1], sums[2], sums[3], a0, a1, a2, a3, b0, b1, sums[0], sums[1], sums[2], sums[3]);
  }

  /// Accumulates O^T of all visible keys into `out` and their weights into the softmax state.
  CUTE_DEVICE void run(Out& out, Softmax& softmax) {
    using namespace cute;
    Tensor sQ = make_tensor(make_smem_ptr(ring.shared.q), typename Ring::SmemLayoutQ{});  // (8, head_dim)
    const Coordinates coord{lane()};
    const bool maps = Ring::kMayMap && ring.params.scores.map.maps();
    std::uint32_t queries[kQuerySteps][2];
    float query_factor[2];
    DescaledValues values;
    const bool of_rows = ring.source.has_descales_of_rows();
    const float descale_k = ring.source.descale_k(), descale_v = ring.source.descale_v();  // on their way from here on
    ring.source.load_q(sQ, lane());
    CUTE_NO_UNROLL
    for (int n_block = -Ring::kLoadedAhead; n_block < ring.keys.blocks; ++n_block) {
      Tensor sK = make_tensor(make_smem_ptr(ring.template acquire<Ring::kStepK>(n_block)),
                              typename Ring::SmemLayoutKV{});  // (N, units)
      if (n_block < 0) continue;
      if (n_block == 0) {
        ring.source.prepare_queries(sQ, 0, ring.shared.of_queries);
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) query_factor[r] = ring.shared.of_queries[get<0>(coord(r, 0))] * descale_k;
        CUTE_UNROLL
        for (int step = 0; step < kQuerySteps; step += 2) {
          std::uint32_t words[4];
          load(words, raw_pointer_cast(&sQ(lane() % 8, 16 * step + lane() / 8 * 8)));
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) queries[step + i / 2][i % 2] = words[i];
        }
      }

      Tensor scores = make_tensor<float>(Accumulator<kN / 16>{});  // (query, key)
      clear(scores);
      CUTE_UNROLL
      for (int step = 0; step < kQuerySteps; step += 2) {
        CUTE_UNROLL
        for (int m = 0; m < kN / 16; ++m) {
          std::uint32_t words[4];  // of keys g and g + 8: 16 columns, and 16 further ones
          load(words, raw_pointer_cast(&sK(16 * m + lane() % 16, 8 * step + lane() / 16 * 8)));
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            const TwoPairs first = widen<Stored>(words[2 * i]), second = widen<Stored>(words[2 * i + 1]);
            multiply(&scores(4 * m), first.first, second.first, first.second, second.second, queries[step + i][0],
                     queries[step + i][1]);
          }
        }
      }
      scale_rows(scores, query_factor);
      if (of_rows) [[unlikely]]
        multiply_columns(scores, ring.template factors<Ring::kStepK>(n_block), 1.0f);

      const bool edge = ring.keys.walk().is_edge(n_block);
      if (edge || maps) [[unlikely]]
        ring.map_and_mask(scores, coord, ring.source.visited(n_block), maps, edge);
      float factor[2];
      if (softmax.fit(scores, factor) && n_block > 0) [[unlikely]]  // the first block finds zeros
        scale_rows(out, factor);

      Tensor sV = make_tensor(make_smem_ptr(ring.template acquire<Ring::kStepV>(n_block)),
                              typename Ring::SmemLayoutKV{});  // (N, units)
      const float* const descales = ring.template factors<Ring::kStepV>(n_block);
      if (of_rows) [[unlikely]] {
        const float change = values.template begin<kN>(descales);
        if (change != 1) [[unlikely]] {
          factor[0] = factor[1] = change;
          scale_rows(out, factor);
        }
      }
      softmax.exponentiate(scores);
      if (of_rows) [[unlikely]]
        multiply_columns(scores, descales, values.to_unit);
      CUTE_UNROLL
      for (int k = 0; k < kN / 16; ++k) {
        const std::uint32_t weights[2] = {
            transposed(round_pair<half_t>(scores(4 * k), scores(4 * k + 1))),
            transposed(round_pair<half_t>(scores(4 * k + 2), scores(4 * k + 3)))};  // of keys 2t and 2t + 8
        CUTE_UNROLL
        for (int n = 0; n < kTiles; n += 2) {
          std::uint32_t words[4], even[4], odd[4];
          load_transposed(words,
                          raw_pointer_cast(&sV(16 * k + lane() / 16 * 8 + lane() % 8, 8 * n + lane() / 8 % 2 * 8)));
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            const TwoPairs wide = widen_values<Stored>(words[i]);
            even[i] = wide.first, odd[i] = wide.second;
          }
          multiply(&out(4 * n), even[0], even[1], even[2], even[3], weights[0], weights[1]);
          multiply(&out(4 * n + 4), odd[0], odd[1], odd[2], odd[3], weights[0], weights[1]);
        }
      }
    }
    const float factor = of_rows ? values.unit : descale_v;
    CUTE_UNROLL
    for (int i = 0; i < size(out); ++i) out(i) *= factor;
  }

  /// Multiplies the columns of scores or weights with `descales`, times `factor`.
  template <class Scores>
  CUTE_DEVICE static void multiply_columns(Scores& scores, const float* descales, float factor) {
    using namespace cute;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      const float descale = descales[lane() / 4 + 8 * c] * factor;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) scores(r, c) *= descale;
    }
  }

  /// Calls `store(query, column, x, y)` for pairs of neighbouring columns of `out`.
  template <class Store>
  CUTE_DEVICE static void for_pairs(Out const& out, Store&& store) {
    CUTE_UNROLL
    for (int n = 0; n < kTiles; n += 2) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i)
        store(lane() % 4 * 2 + i % 2, 16 * n + 2 * (lane() / 4 + i / 2 * 8), out(4 * n + i), out(4 * n + 4 + i));
    }
  }
};

}  // namespace flashtile
