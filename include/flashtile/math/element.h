// The types that kernels compute with, by dtype.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/float8.h>
#include <cutlass/half.h>

#include <type_traits>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// CUDA kernels exist for the two dtypes of 16 bits, and one of 8.
template <DType kDType>  // clang-format off
using ElementOf = std::conditional_t<
    kDType == DType::kE4M3, cutlass::float_e4m3_t,
    std::conditional_t<kDType == DType::kFloat16, cutlass::half_t, cutlass::bfloat16_t>>;  // clang-format on

}  // namespace flashtile
