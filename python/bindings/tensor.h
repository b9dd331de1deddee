// Python tensors as TensorViews, memory that is none, and the stream they are computed on.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "bindings.h"
#include "flashtile/plan.h"
#include "flashtile/tensor_view.h"

namespace flashtile::bindings {

/// What messages expect of a tensor whose dtype the core does not know.
inline constexpr const char* kFloats = "float32, float16 or bfloat16";
inline constexpr const char* kInts = "int32";

/// The argument `name` of `function`, a tensor or hidden_memory; the object must outlive the view. Throws InvalidType
/// if it is no tensor.
TensorView tensor_view(const char* function, const char* name, nb::handle object, const char* dtypes = kFloats);

/// The same for an argument that may be None.
inline TensorView optional_view(const char* function, const char* name, nb::handle object,
                                const char* dtypes = kFloats) {
  return object.is_none() ? TensorView{} : tensor_view(function, name, object, dtypes);
}

/// float32 memory on `device` from the allocator of the framework of `like`, half the price of a tensor: a
/// capsule, which tensor_view takes. None where the framework offers no such memory or has none left.
nb::object hidden_memory(nb::handle like, Device device, std::initializer_list<std::int64_t> shape);

/// The current stream of the framework that made `tensor`, on `device`.
Stream current_stream(nb::handle tensor, Device device);

}  // namespace flashtile::bindings
