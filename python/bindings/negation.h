// PyTorch's lazy negation: what z.conj().imag and torch._neg_view(x) return has a bit that says that its numbers are
// the negatives of those in memory. DLPack does not show it, and x.is_neg() takes 0.1 µs, of the few of a whole call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bindings.h"
#include "dlpack.h"

namespace flashtile::bindings {

/// Where the bit is within a tensor's own memory: in a word behind the sizes, to which DLPack points. No header of
/// PyTorch is at hand to say in which, so it is looked for, once, by setting the bit.
class NegativeBit {
 public:
  /// Of tensors of this type. The place is known of torch.Tensor and Parameter, unless it was not found.
  static NegativeBit of(nb::handle type, const dlpack::Exchange& exchange);

  /// False only if the bit is not set; where its place is not known, true.
  bool may_be_set(const dlpack::Tensor& tensor) const {
    if (mask_ == 0) return true;
    return (word_at(tensor.shape, offset_) & mask_) != 0;
  }

 private:
  static NegativeBit find(const dlpack::Exchange& exchange);

  static std::uint64_t word_at(const std::int64_t* sizes, std::ptrdiff_t offset) {
    std::uint64_t word;
    std::memcpy(&word, sizes + offset, sizeof(word));
    return word;
  }

  std::ptrdiff_t offset_ = 0;  // in words
  std::uint64_t mask_ = 0;     // 0: not known
};

/// What the tensor itself says.
bool is_negated(nb::handle tensor);

}  // namespace flashtile::bindings
