// Python tensors as TensorViews, and the stream they are computed on.
#pragma once

#include "bindings.h"
#include "flashtile/plan.h"
#include "flashtile/tensor_view.h"

namespace flashtile::bindings {

/// The argument `name` of `function`; the object must outlive the view. Throws InvalidType if it is no tensor.
TensorView tensor_view(const char* function, const char* name, nb::handle object);

/// The same for an argument that may be None.
inline TensorView optional_view(const char* function, const char* name, nb::handle object) {
  return object.is_none() ? TensorView{} : tensor_view(function, name, object);
}

/// The current stream of the framework that made `tensor`, on `device`.
Stream current_stream(nb::handle tensor, Device device);

}  // namespace flashtile::bindings
