// This file detects PyTorch's lazy negation: what z.conj().imag and torch._neg_view(x) return has a bit that says that
// its numbers are the negatives of those in memory. DLPack does not show it, and x.is_neg() takes 0.1 µs, while a whole
// call takes a few.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bindings.h"
#include "dlpack.h"

namespace flashtile::bindings {

/// This says where the bit is within a tensor's own memory: in a word after the sizes, to which DLPack points. The
/// build has no header of PyTorch that says in which word, so it is searched for, once, by setting the bit.
class NegativeBit {
 public:
  /// Returns where the bit is in tensors of this type. That is known only of torch.Tensor and Parameter, and only if
  /// the bit was found.
  static NegativeBit of(nb::handle type, const dlpack::Exchange& exchange);

  /// Returns false only if the bit is not set; where its position is not known, returns true.
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
  std::uint64_t mask_ = 0;     // 0: the position is not known
};

/// Asks the tensor itself.
bool is_negated(nb::handle tensor);

}  // namespace flashtile::bindings
