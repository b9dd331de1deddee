// This file has the transposer of Hopper's forward kernel for numbers of 8 bits: matmuls take the second operand by
// columns only where its numbers have 16 bits, so P·V wants V transposed.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// Transposes each tile of V as it comes, from (N, head_dim) to (head_dim, N), and permutes its keys. It is one of the
/// warps that do, each for some of the columns.
///
/// A thread has the scores of keys 8 · i + 2 · q and their neighbours, where q counts the threads of a quad, and the
/// left operand of P·V wants of it the weights of keys 4 · q to 4 · q + 3 of every 16. Weights stay where they are, and
/// keys move instead: place 4 · q + i of 16 has key 2 · q + i for i < 2, else key 8 + 2 · q + i − 2. That is the order
/// in which ldmatrix and a permutation of bytes leave them anyway.
template <class Mainloop>
struct ValueTransposerSm90 {
  using Element = typename Mainloop::Element;
  using SharedStorage = typename Mainloop::SharedStorage;
  static constexpr int kN = Mainloop::kN, kHeadDimV = Mainloop::kHeadDimV;
  static constexpr int kColumns = Mainloop::kColumnsV;                     // of a box of V,
  static constexpr int kKeys = columns_per_box(kN, int(sizeof(Element)));  // and of one of the transposed tile
  static constexpr int kKeysAtOnce = 16, kColumnsAtOnce = 32, kSteps = 4;
  static_assert(kN % (kSteps * kKeysAtOnce) == 0);

  SharedStorage& shared;
  const int part;  // which of the columns are this warp's
  const int lane = int(threadIdx.x % 32);

  CUTE_DEVICE void run() {
    typename Ring<Mainloop::kWorks>::Cursor work_at{};
    RingCursor<Mainloop::kStagesOfRows> rows_at{};
    RingCursor<Mainloop::kStagesV> at{};
    auto& loaded = shared.few.barriers;
    CUTE_NO_UNROLL
    for (;; work_at.advance()) {
      shared.work_barriers.wait_full(work_at);
      const auto walk = [&] { return shared.work[work_at.stage].keys.walk(); };
      if (shared.work[work_at.stage].keys.blocks < 0) break;
      CUTE_NO_UNROLL
      for (int n_block = walk().first(); n_block < walk().end(); n_block = walk().next(n_block)) {
        loaded.wait_full(rows_at);
        shared.v_barriers.empty[at.stage].wait(at.parity ^ 1);
        transpose(shared.rows_of_v[rows_at.stage], shared.v[at.stage]);
        cutlass::arch::fence_view_async_shared();  // matmuls read it by another way
        loaded.release_by_warp(rows_at);
        rows_at.advance();
        if (lane == 0) shared.v_barriers.full[at.stage].arrive();
        at.advance();
      }
      __syncwarp();
      if (lane == 0) shared.work_barriers.release_by_thread(work_at);
    }
  }

 private:
  /// Each step takes 16 keys of 32 columns: four 8 × 8 matrices of pairs of columns, of which a thread gets,
  /// transposed, a pair of columns of two keys. Two bytes of each of two registers are four keys of one column. Of a
  /// column pair lanes with c < 4 store the left column first, and others the right one, so that eight rows of one
  /// store are in different banks.
  CUTE_DEVICE void transpose(Element const* from, Element* to) const {
    using namespace cute;
    const int c = lane % 8, matrix = lane / 8;
    const std::uint32_t source =
        cast_smem_ptr_to_uint(from) + Mainloop::template place_in_box<kColumns>(matrix % 2 * 8 + c, matrix / 2 * 16);
    const int column = matrix / 2 * 16 + 2 * c + (matrix % 2 ^ c / 4);
    const std::uint32_t target = cast_smem_ptr_to_uint(to) + Mainloop::template place_in_box<kKeys>(column, 0);
    const bool left_first = lane / 4 < 4;
    const std::uint32_t first = left_first ? 0x6420 : 0x7531, second = left_first ? 0x7531 : 0x6420;
    CUTE_NO_UNROLL
    for (int column = part * kColumnsAtOnce; column < kHeadDimV; column += Mainloop::kTransposers * kColumnsAtOnce) {
      const int of_box = column % kColumns;
      const std::uint32_t in_box = (source ^ of_box) + (column - of_box) * kN;
      CUTE_UNROLL
      for (int first_key = 0; first_key < kN; first_key += kSteps * kKeysAtOnce) {
        std::uint32_t word[kSteps][4];  // all are asked for before the first is waited for
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(word[i][0]), "=r"(word[i][1]), "=r"(word[i][2]), "=r"(word[i][3])
                       : "r"(in_box + (first_key + i * kKeysAtOnce) * kColumns));
        }
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          const auto [a, b, c, d] = word[i];
          const int key = first_key + i * kKeysAtOnce;
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                           (target ^ key % kKeys) + key / kKeys * kKeys * kHeadDimV + column * kKeys),
                       "r"(__byte_perm(a, b, first)), "r"(__byte_perm(a, b, second)), "r"(__byte_perm(c, d, first)),
                       "r"(__byte_perm(c, d, second))
                       : "memory");
        }
      }
    }
  }
};

}  // namespace flashtile
