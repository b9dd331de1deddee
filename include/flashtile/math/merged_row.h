// This file puts the results of a row over several sets of keys together, where the sets share no key.
#pragma once

#include "flashtile/math/state.h"

namespace flashtile {

/// MergedRow is a row over the keys of the results added so far, whose outputs are normalised. Their weighted sum is
/// relative to the leader, the result with the greatest lse, as a RowState is to its reference. Only differences of
/// two results are scaled, so that scores may be as large as FinishedRow allows.
struct MergedRow {
  FinishedRow leader;
  float sum = 0;  // of the weights of results, 1 for the leader's

  /// Step has the factors of the sum of outputs before, and of the output that joins it.
  struct Step {
    float before, added;
    FLASHTILE_HOST_DEVICE float sum(float outputs, float output) const { return before * outputs + added * output; }
  };

  /// Adds a result that saw something. If it holds NaN, the row becomes NaN for good.
  FLASHTILE_HOST_DEVICE Step add(FinishedRow const& result, float unit_log2) {
    const float ahead = fmaf(result.reference - leader.reference, unit_log2, result.log2_sum - leader.log2_sum);
    const bool leads = !(ahead <= 0);  // as does NaN, since the row may have no leader yet
    const float less = exp2f(-fabsf(ahead));
    const Step step{leads ? less : 1, leads ? 1 : less};
    if (leads) leader = result;
    sum = step.sum(sum, 1);
    return step;
  }

  /// Returns the factor of the sum of outputs; 0 for a row that saw nothing.
  FLASHTILE_HOST_DEVICE float normaliser() const { return sum == 0 ? 0.0f : reciprocal(sum); }
  FLASHTILE_HOST_DEVICE FinishedRow row() const {
    if (sum == 0) return {};
    return {leader.reference, leader.log2_sum + log2f(sum)};
  }
};

}  // namespace flashtile
