// This file holds what check.cpp and check_kvcache.cpp share: an argument with its name, which knows how to refuse
// itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "flashtile/error.h"
#include "flashtile/problem.h"
#include "message.h"
#include "overlap.h"

namespace flashtile {

using Size = std::int64_t;

inline constexpr Size kSizeLimit = Size{1} << 30;  // sizes are below this, so that mask.h can add them in an int
inline constexpr Size kHeadDimStep = 8;            // head dimensions are multiples of this: 16 bytes of a 2-byte dtype
inline constexpr Size kHeadDimLimit = 256;
inline constexpr int kAlignment = 16;  // bytes that CUDA kernels read at a time

/// An operand is a tensor with its name and the names of its sizes: enough to refuse it.
struct Operand {
  const char* function;
  const char* name;
  const char* sizes;
  const TensorView& view;

  template <class Error = InvalidArgument>
  [[noreturn]] void refuse(const std::string& found, const std::string& expected) const {
    flashtile::refuse<Error>(function, name, found, expected);
  }
  [[noreturn]] void refuse_shape(const std::string& expected) const {
    refuse("has shape " + shape_string(view), expected);
  }

  const Operand& has_rank(int rank) const {
    if (!view.given()) refuse<InvalidType>("is missing", std::string("a tensor ") + sizes);
    if (view.rank != rank) refuse_shape(std::to_string(rank) + " dimensions = " + sizes);
    return *this;
  }

  const Operand& has_shape(std::initializer_list<Size> expected) const {
    has_rank(static_cast<int>(expected.size()));
    if (!std::equal(expected.begin(), expected.end(), view.shape.begin()))
      refuse_shape(shape_string(expected.begin(), view.rank) + " = " + sizes);
    return *this;
  }

  const Operand& has_dtype(DType dtype, const char* why = "") const {
    if (view.dtype != dtype)
      refuse<InvalidType>(std::string("has dtype ") + name_of(view.dtype), std::string(name_of(dtype)) + why);
    return *this;
  }

  const Operand& is_on(Device device, const char* why = ", as q") const {
    if (view.device != device) refuse("is on " + name_of(view.device), name_of(device) + why);
    return *this;
  }

  /// Strides of dimensions with fewer than two elements are ignored.
  template <class Error = InvalidArgument>
  const Operand& has_contiguous_last_dimension() const {
    const int last = view.rank - 1;
    if (view.shape[last] > 1 && view.strides[last] != 1 && !view.empty())
      refuse<Error>("has stride " + std::to_string(view.strides[last]) + " in its last dimension", "1");
    return *this;
  }

  const Operand& is_contiguous() const {
    if (!view.contiguous())
      refuse("has strides " + shape_string(view.strides.data(), view.rank), "a contiguous tensor");
    return *this;
  }

  template <class Error = Unreadable>
  const Operand& is_aligned() const {
    if (view.device.type != DeviceType::kCuda || view.empty()) return *this;
    if (reinterpret_cast<std::uintptr_t>(view.data) % kAlignment != 0)
      refuse<Error>("is at an address that is not a multiple of 16 bytes", "one on CUDA");
    for (int i = 0; i < view.rank - 1; ++i)
      if (view.shape[i] > 1 && view.strides[i] * bytes_of(view.dtype) % kAlignment != 0)
        refuse<Error>("has strides " + shape_string(view.strides.data(), view.rank), "multiples of 16 bytes on CUDA");
    return *this;
  }

  /// Checks that no two elements are one in memory, where they are to be written; else it expects what `expected` says.
  const Operand& is_writable(const char* expected) const {
    for (int i = 0; i < view.rank; ++i)
      if (view.shape[i] > 1 && view.strides[i] == 0) refuse("has stride 0 in dimension " + std::to_string(i), expected);
    if (may_overlap_itself(view)) refuse("has strides " + shape_string(view.strides.data(), view.rank), expected);
    return *this;
  }

  /// Checks what q, k, v, the output and their gradients have in common.
  const Operand& is_matrix_like(const TensorView& q) const { return has_dtype(q.dtype, ", as q").lies_like(q); }
  /// Checks all of that but the dtype.
  const Operand& lies_like(const TensorView& q) const {
    return is_on(q.device).has_contiguous_last_dimension().is_aligned();
  }
};

/// These are the names of the sizes in messages.
struct Names {
  const char *q, *k, *v, *out, *lse, *state;
};
const Names& names_of(const Problem& problem);

inline std::string at_index(int value, int index) {
  return "has " + std::to_string(value) + " at index " + std::to_string(index);
}

/// These checks are common to all calls (check.cpp).
void check_floating(const Operand& q);
/// Returns whether rows are multiples of the bytes that kernels read, so that the tensor or a copy can be aligned. Only
/// those of 8-bit numbers may not be.
bool has_whole_rows(const TensorView& t);
void check_whole_rows(const Operand& operand);
void check_head_dim(const Operand& operand, const char* size_name);
void check_sizes(const Operand& operand);
void check_heads(const Operand& q, const Operand& k, Size heads_q, Size heads_k);
void check_alibi_slopes(const char* function, const TensorView& slopes, const Problem& p);
void check_mask(const char* function, const TensorView& mask, Problem& p);
/// Checks a column mask of so many columns, for 1 batch entry or, if it may tell them apart, for each, and sets what
/// `p` says of it.
void check_columns(const Operand& mask, bool may_have_entries, Size columns, Problem& p);
void check_per_head(const char* function, const char* name, const TensorView& values, const Problem& p);
void check_lse(const char* function, const char* name, const TensorView& lse, const Problem& p);
void check_max_logits(const char* function, const TensorView& max_logits, const Problem& p);
void check_state(const char* function, const TensorView& state, const Problem& p);
void check_out(const char* function, const char* name, const TensorView& out, const TensorView& q, const Problem& p);
/// Checks that results can be written to the memory of `out`, if it is given. It is never copied, as what is `read` may
/// be, and shares no memory with that.
void check_place(const Operand& out, std::initializer_list<Operand> read);

/// Checks that the shape is (T, heads, width) where p is ragged, and (B, rows, heads, width) otherwise.
const Operand& has_rows(const Operand& operand, const Problem& p, Size rows, Size heads, Size width);

/// Returns B of a ragged batch, which only cu_seqlens_q tells.
Size batch_of(const Operand& begins);
/// Checks a table of `count` int32 numbers and returns them.
const int* check_table(const Operand& operand, Size count, Device device);
/// Checks the tables of one side: where sequences begin, and how many of their rows count.
void check_tables(const Operand& begins, const Operand& used, const char* rows_name, int rows, int batch,
                  Device device);

}  // namespace flashtile
