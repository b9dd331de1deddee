// This file holds what is stored of each query row besides its output.
#pragma once

#include <cstdint>

#include "flashtile/largest_scores.h"
#include "flashtile/macros.h"
#include "flashtile/math/state.h"
#include "flashtile/problem.h"

namespace flashtile {

/// These are the strides of an array with one number per row, (B, H_q, S_q) or, of a ragged batch, (H_q, T_q),
/// contiguous.
struct RowStrides {
  std::int64_t batch;
  std::int64_t head;

  static RowStrides of(const Problem& p) {
    return {p.ragged ? 0 : std::int64_t{p.heads_q} * p.seqlen_q, std::int64_t{p.seqlen_q}};
  }
  FLASHTILE_HOST_DEVICE std::int64_t at(int batch_index, int head_index, int row) const {
    return batch_index * batch + head_index * head + row;
  }
};

/// A forward writes these results, and a backward reads them.
struct RowResults {
  float* lse;    // (B, H_q, S_q) contiguous, or null
  float* state;  // (2, B, H_q, S_q) contiguous: reference and log2_sum of FinishedRow; or null
  std::int64_t count;
  RowStrides strides;
  LargestScores largest;

  static RowResults of(const Problem& p, const ForwardTensors& t) {
    const auto floats = [](const TensorView& x) { return x.given() ? static_cast<float*>(x.data) : nullptr; };
    return {floats(t.lse), floats(t.state), p.query_rows(), RowStrides::of(p), LargestScores::of(t.max_logits)};
  }

  FLASHTILE_HOST_DEVICE bool wanted() const { return lse != nullptr || state != nullptr; }
  FLASHTILE_HOST_DEVICE void store(std::int64_t index, FinishedRow const& row, float unit) const {
    if (lse != nullptr) lse[index] = row.lse(unit);
    if (state == nullptr) return;
    state[index] = row.reference;
    state[count + index] = row.log2_sum;
  }
  FLASHTILE_HOST_DEVICE FinishedRow load(std::int64_t index, float unit) const { return finished(stored(index), unit); }

  /// stored() and finished() are load() in two steps, so that other work can hide the latency of memory between them:
  /// the first returns what memory holds of a row, the second the row that this stands for.
  struct Stored {
    float lse_or_reference = 0;
    float log2_sum = 0;
  };
  FLASHTILE_HOST_DEVICE Stored stored(std::int64_t index) const {
    if (state == nullptr) return {lse[index]};
    return {state[index], state[count + index]};
  }
  FLASHTILE_HOST_DEVICE FinishedRow finished(Stored const& stored, float unit) const {
    if (state == nullptr) return FinishedRow::of_lse(stored.lse_or_reference, unit);
    return {stored.lse_or_reference, stored.log2_sum};
  }
};

}  // namespace flashtile
