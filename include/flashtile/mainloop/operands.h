// These functions turn what one matmul of mma.sync leaves in registers into an operand of the next one.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/math/element.h"
#include "flashtile/math/round.h"

namespace flashtile {

/// This is the matmul of one warp, 16 × 8 × 16, with float32 sums.
template <DType kDType>
using MmaAtomSm80 = std::conditional_t<kDType == DType::kFloat16, cute::SM80_16x8x16_F32F16F16F32_TN,
                                       cute::SM80_16x8x16_F32BF16BF16F32_TN>;

/// Returns the i-th kBlocks neighbouring n8 blocks of an operand (mma, n), or of an accumulator (mma, m, n): kMode says
/// which mode n is.
template <int kMode, int kBlocks, class Fragment>
CUTE_DEVICE auto n8_blocks(Fragment&& fragment, int i) {
  using namespace cute;
  if constexpr (kMode == 1)
    return logical_divide(fragment, Shape<Underscore, Int<kBlocks>>{})(_, make_coord(_, i));
  else
    return logical_divide(fragment, Shape<Underscore, Underscore, Int<kBlocks>>{})(_, _, make_coord(_, i));
}

/// Returns the k-th pair of neighbouring n8 blocks of an accumulator (mma, m, n).
template <class Accumulator>
CUTE_DEVICE auto n16_block(Accumulator& acc, int k) {
  return n8_blocks<2, 2>(acc, k);
}

/// Returns float32 accumulators ((2, 2), m, 2) of one n16 block, rounded, as the A operand ((2, 2, 2), m) in Element.
template <class Element, class Accumulator>
CUTE_DEVICE auto as_operand_a(Accumulator const& acc) {
  using namespace cute;
  Tensor rounded = make_fragment_like<Element>(acc);
  round_to(acc, rounded);
  auto l = rounded.layout();
  return make_tensor(rounded.data(), make_layout(make_layout(get<0>(l), get<2>(l)), get<1>(l)));
}

}  // namespace flashtile
