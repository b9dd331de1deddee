// This file has the views of contiguous tensors that the tests of the C++ library pass to it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "flashtile/tensor_view.h"

namespace flashtile {

inline TensorView contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {}) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; stride *= view.shape[i--]) view.strides[i] = stride;
  return view;
}

}  // namespace flashtile
