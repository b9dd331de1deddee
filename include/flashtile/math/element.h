// The types that kernels compute with, by dtype.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/float8.h>
#include <cutlass/half.h>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// CUDA kernels exist for the dtypes of 16 bits and those of 8.
template <DType kDType>
struct ElementType;
template <>
struct ElementType<DType::kFloat16> {
  using Type = cutlass::half_t;
};
template <>
struct ElementType<DType::kBFloat16> {
  using Type = cutlass::bfloat16_t;
};
template <>
struct ElementType<DType::kE4M3> {
  using Type = cutlass::float_e4m3_t;
};
template <>
struct ElementType<DType::kE5M2> {
  using Type = cutlass::float_e5m2_t;
};
template <DType kDType>
using ElementOf = typename ElementType<kDType>::Type;

/// This is what matmuls of 16 bits take numbers of the dtype as: those of 8 bits are all numbers of float16 too.
template <DType kDType>
using ElementOf16Bits = ElementOf<is_fp8(kDType) ? DType::kFloat16 : kDType>;

}  // namespace flashtile
