// Python tensors as TensorViews, memory that is none, and the stream they are computed on.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>

#include "bindings.h"
#include "dlpack.h"
#include "flashtile/plan.h"
#include "flashtile/tensor_view.h"

namespace flashtile::bindings {

/// The argument `name` of `function`; the object must outlive the view. Throws InvalidType if it is no tensor.
TensorView tensor_view(const char* function, const char* name, nb::handle object);

/// The same for an argument that may be None.
inline TensorView optional_view(const char* function, const char* name, nb::handle object) {
  return object.is_none() ? TensorView{} : tensor_view(function, name, object);
}

/// float32 memory from the allocator of a framework that no tensor shows: half the price of one. Opaque to Python.
class Buffer {
 public:
  /// Memory on `device` by the framework of `like`; nothing where it offers none, or has none left.
  static std::optional<Buffer> allocate(nb::handle like, Device device, std::initializer_list<std::int64_t> shape);
  const TensorView& view() const { return view_; }

 private:
  struct Free {
    void operator()(dlpack::ManagedTensor* memory) const;
  };
  std::unique_ptr<dlpack::ManagedTensor, Free> memory_;
  TensorView view_;
};

/// The current stream of the framework that made `tensor`, on `device`.
Stream current_stream(nb::handle tensor, Device device);

}  // namespace flashtile::bindings
