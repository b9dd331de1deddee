// The types that kernels compute with, by dtype.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <type_traits>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// CUDA kernels exist for the two dtypes of 16 bits.
template <DType kDType>
using ElementOf = std::conditional_t<kDType == DType::kFloat16, cutlass::half_t, cutlass::bfloat16_t>;

}  // namespace flashtile
