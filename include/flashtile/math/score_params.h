// This file has what turns a raw score Q·K into one that softmax takes, as a kernel is given it: the score map, the
// mask, and what both ask of a tile's rows.
#pragma once

#include <cstdint>

#include "flashtile/macros.h"
#include "flashtile/mask/mask.h"
#include "flashtile/math/head_packing.h"
#include "flashtile/math/softmax.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// AlibiSlopes are one slope per (batch entry, query head), in the caller's memory, or none.
struct AlibiSlopes {
  const float* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;

  /// Returns those of a tensor (H_q) or (B, H_q), or none if it is not given.
  static AlibiSlopes of(const TensorView& slopes) {
    if (!slopes.given()) return {};
    return {static_cast<const float*>(slopes.data), slopes.rank == 2 ? slopes.strides[0] : 0,
            slopes.strides[slopes.rank - 1]};
  }

  /// Returns the slope of a query head, which is 0 where there are none.
  FLASHTILE_HOST_DEVICE float at(int batch, int head) const {
    return data == nullptr ? 0.0f : data[batch * batch_stride + head * head_stride];
  }
};

/// ScoreParams says how raw scores become scores. `Packing`, HeadPacking, GroupPacking or NoPacking, says which query
/// and head a row of a tile is.
template <class Packing>
struct ScoreParams {
  ScoreMap map;
  Mask mask;
  Packing packing;
  AlibiSlopes slopes;

  /// Returns the same for tiles with rows and columns exchanged.
  FLASHTILE_HOST_DEVICE ScoreParams transposed() const { return {map, mask.transposed(), packing, slopes}; }
};

}  // namespace flashtile
