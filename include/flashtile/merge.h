// This file adds results over further keys to what is known of rows so far: the online softmax over calls, as in ring
// attention (Liu et al. 2023, arXiv 2310.01889).
#pragma once

#include <cstdint>

#include "flashtile/macros.h"
#include "flashtile/math/state.h"
#include "flashtile/plan.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// RowStates are the FinishedRow of each row, in a tensor (2, B, H, S) of any strides: references, then log2_sums.
struct RowStates {
  float* data;
  std::int64_t sums;  // from a row's reference to its log2_sum, in elements
  std::int64_t batch, head, row;

  static RowStates of(const TensorView& t) {
    return {static_cast<float*>(t.data), t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
  }
  FLASHTILE_HOST_DEVICE std::int64_t at(int batch_index, int head_index, int row_index) const {
    return batch_index * batch + head_index * head + row_index * row;
  }
  FLASHTILE_HOST_DEVICE FinishedRow load(std::int64_t index) const { return {data[index], data[index + sums]}; }
  FLASHTILE_HOST_DEVICE void store(std::int64_t index, FinishedRow const& of) const {
    data[index] = of.reference;
    data[index + sums] = of.log2_sum;
  }
};

/// PartialResult is what a forward leaves of rows over some of their keys.
struct PartialResult {
  TensorView out;    // (B, S, H, D_v), normalised
  TensorView state;  // (2, B, H, S) float32: see RowStates
};

/// MergeCall adds the result `part` to `total`, whose keys are others.
struct MergeCall {
  PartialResult total;  // of float32, in memory that is not part's
  PartialResult part;   // of float32, float16 or bfloat16
  float unit;           // of scores: see ScoreMap
  bool first;           // the total is of no keys yet: it is not read
};

/// Checks the arguments in the name of `function`, and runs on the device of the tensors.
void merge(const char* function, const MergeCall& call, const DeviceInfo& device, Stream stream);

}  // namespace flashtile
