// This file puts results over disjoint keys together: the online softmax over calls, as in ring attention (Liu et al.
// 2023, arXiv 2310.01889), and the sum of the gradients of such calls.
#pragma once

#include <cstdint>
#include <vector>

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

/// PartialResult is what one call found for the rows [begin, end).
struct PartialResult {
  std::int64_t begin, end;
  TensorView out;    // (B, end − begin, H, D_v); normalised, unless it is for a sum
  TensorView state;  // (2, B, H, end − begin) float32: see RowStates. None in a sum
};

inline constexpr int kMostParts = 8;  // of a call

/// MergeCall merges partial results over disjoint keys, or, without a state, sums them. Where no part has a row, the
/// row has seen nothing, or is 0.
struct MergeCall {
  TensorView out;                    // (B, S, H, D_v) of float32, or of the parts' dtype, or any if that is float32
  TensorView state;                  // (2, B, H, S) float32
  std::vector<PartialResult> parts;  // of one dtype, in memory that is not out's
  float unit;                        // of scores: see ScoreMap
  bool adds;                         // whether what `out`, of float32, and `state` hold already is one more part
};

/// Returns the unit of scores (see ScoreMap) of a call of this scale, of this softcap (0: none) and with ALiBi or not.
float unit_of_scores(float scale, float softcap, bool alibi);

/// Checks the arguments in the name of `function`, and runs on the device of the tensors.
void merge(const char* function, const MergeCall& call, const DeviceInfo& device, Stream stream);

}  // namespace flashtile
