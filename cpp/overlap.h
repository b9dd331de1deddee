// Whether two tensors have memory in common, by addresses, sizes and strides alone.
#pragma once

#include <cstdint>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// The memory from a tensor's first byte to its last. Between its elements may lie those of others.
struct Stretch {
  std::int64_t begin = 0, end = 0;  // addresses

  /// Of tensors on one device: where it is false, they share nothing.
  bool meets(const Stretch& other) const { return begin < other.end && other.begin < end; }
};

/// Empty where the tensor is, or is not given.
Stretch stretch_of(const TensorView& tensor);

/// Whether an element of one is an element of the other too; of tensors of the same dtype, on one device. Layouts that
/// interleave so irregularly that thousands of combinations would have to be tried are taken to share nothing.
bool share_elements(const TensorView& a, const TensorView& b);

}  // namespace flashtile
