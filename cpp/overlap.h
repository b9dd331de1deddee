// This file answers whether two tensors have memory in common, by addresses, sizes and strides alone.
#pragma once

#include <cstdint>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// A stretch is the memory from a tensor's first byte to its last. Elements of other tensors may lie between its own.
struct Stretch {
  std::int64_t begin = 0, end = 0;  // addresses

  /// Two tensors on one device share nothing where this is false.
  bool meets(const Stretch& other) const { return begin < other.end && other.begin < end; }
};

/// Returns the stretch of a tensor, an empty one where the tensor is empty or not given.
Stretch stretch_of(const TensorView& tensor);

/// Returns whether an element of one tensor is an element of the other too; both have the same dtype and lie on one
/// device. Where layouts interleave so irregularly that thousands of combinations would have to be tried, it says no.
bool share_elements(const TensorView& a, const TensorView& b);

/// Returns whether two elements of one tensor lie in the same place. Of layouts so irregular it says yes.
bool may_overlap_itself(const TensorView& tensor);

}  // namespace flashtile
