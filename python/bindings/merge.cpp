// This file binds the sum of results over disjoint keys.
#include "flashtile/merge.h"

#include "bindings.h"
#include "call.h"
#include "tensor.h"

namespace flashtile::bindings {
namespace {

constexpr const char* kFunction = "merge";

void merge_into(nb::handle total_out, nb::handle total_state, nb::handle out, nb::handle state, float unit,
                bool first) {
  const MergeCall call{
      .total = {.out = tensor_view(kFunction, "total_out", total_out, kFloat32),
                .state = tensor_view(kFunction, "total_state", total_state, kFloat32)},
      .part = {.out = tensor_view(kFunction, "out", out), .state = tensor_view(kFunction, "state", state, kFloat32)},
      .unit = unit,
      .first = first};
  const Device at = call.total.out.device;
  const DeviceInfo device = device_for(kFunction, at);  // which says what to do about a build without CUDA
  const Stream stream = current_stream(total_out, at);
  const nb::gil_scoped_release no_gil;
  merge(kFunction, call, device, stream);
}

}  // namespace

void bind_merge(nb::module_& module) {
  module.def("merge", &merge_into, nb::arg("total_out"), nb::arg("total_state"), nb::arg("out"), nb::arg("state"),
             nb::arg("unit"), nb::arg("first"));
}

}  // namespace flashtile::bindings
