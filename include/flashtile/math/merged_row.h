// This file puts the results of a row over two sets of keys together, where the sets share no key.
#pragma once

#include "flashtile/math/state.h"

namespace flashtile {

/// MergedRow is a row over the keys of two results a and b: its softmax, and the shares that their outputs, which are
/// normalised, have in its own. Only differences of a and b are scaled, so that scores may be as large as FinishedRow
/// allows. A result that saw nothing does not count, whatever its output holds; what else is NaN makes the row NaN.
struct MergedRow {
  FinishedRow row;
  float share_a = 0, share_b = 0;
  bool a_counts = false, b_counts = false;

  FLASHTILE_HOST_DEVICE static MergedRow of(FinishedRow const& a, FinishedRow const& b, float unit_log2) {
    const bool a_counts = !a.saw_nothing(), b_counts = !b.saw_nothing();
    const float difference = fmaf(b.reference - a.reference, unit_log2, b.log2_sum - a.log2_sum);
    const float ahead = !a_counts ? kInfinity : !b_counts ? -kInfinity : difference;  // b's lse, of a's, in log2 units
    const bool b_leads = ahead > 0;
    const float sum = 1 + exp2f(-fabsf(ahead));  // of the weights, relative to that of whichever leads
    const float more = reciprocal(sum), less = exp2f(-fabsf(ahead)) * more;
    const FinishedRow row{b_leads ? b.reference : a.reference, (b_leads ? b.log2_sum : a.log2_sum) + log2f(sum)};
    return {a_counts || b_counts ? row : FinishedRow{}, b_leads ? less : more, b_leads ? more : less, a_counts,
            b_counts};
  }

  /// Returns an element of the output, which is 0 if neither a nor b saw anything.
  FLASHTILE_HOST_DEVICE float out(float of_a, float of_b) const {
    return share_a * (a_counts ? of_a : 0.0f) + share_b * (b_counts ? of_b : 0.0f);
  }
};

}  // namespace flashtile
