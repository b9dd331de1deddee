// This file views Python tensors as TensorViews, allocates memory that is no tensor, and finds the current stream.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "bindings.h"
#include "flashtile/plan.h"
#include "flashtile/tensor_view.h"

namespace flashtile::bindings {

/// Messages say that they expect these where the core does not know a tensor's dtype.
inline constexpr const char* kFloats = "float32, float16 or bfloat16";
inline constexpr const char* kInts = "int32";
inline constexpr const char* kFloat32 = "float32";
inline constexpr const char* kE4M3 = "float8_e4m3fn";

/// These say which torch.dtype a DType is, and the other way round.
DType to_dtype(nb::handle dtype);
nb::handle torch_dtype(DType dtype);

/// Returns a view of the argument `name` of `function`, a tensor or hidden_memory; the object must outlive the view.
/// Throws InvalidType if it is no tensor.
TensorView tensor_view(const char* function, const char* name, nb::handle object, const char* dtypes = kFloats);

/// Does the same for an argument that may be None.
inline TensorView optional_view(const char* function, const char* name, nb::handle object,
                                const char* dtypes = kFloats) {
  return object.is_none() ? TensorView{} : tensor_view(function, name, object, dtypes);
}

/// Returns float32 memory on `device` from the allocator of the framework of `like`, at half the price of a tensor: a
/// capsule, which tensor_view accepts. It is None where the framework offers no such memory or has none left.
nb::object hidden_memory(nb::handle like, Device device, std::initializer_list<std::int64_t> shape);

/// Returns the current stream, on `device`, of the framework that made `tensor`.
Stream current_stream(nb::handle tensor, Device device);

}  // namespace flashtile::bindings
