// This file binds the merge and the sum of results over disjoint keys.
#include "flashtile/merge.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "bindings.h"
#include "call.h"
#include "tensor.h"

namespace flashtile::bindings {
namespace {

constexpr const char* kFunction = "merge";

/// These are (begin, end, out, state) of each part.
using Parts = std::vector<std::tuple<std::int64_t, std::int64_t, nb::object, nb::object>>;

void merge_into(nb::handle out, nb::handle state, const Parts& parts, float unit, bool adds) {
  MergeCall call{.out = tensor_view(kFunction, "out", out),
                 .state = optional_view(kFunction, "state", state, kFloat32),
                 .parts = {},
                 .unit = unit,
                 .adds = adds};
  call.parts.reserve(parts.size());
  for (const auto& [begin, end, of_rows, state_of_rows] : parts) {
    const std::string name = "parts[" + std::to_string(call.parts.size()) + "]";
    call.parts.push_back({.begin = begin,
                          .end = end,
                          .out = tensor_view(kFunction, (name + ".out").c_str(), of_rows),
                          .state = optional_view(kFunction, (name + ".state").c_str(), state_of_rows, kFloat32)});
  }
  const Device at = call.out.device;
  const DeviceInfo device = device_for(kFunction, at);  // which says what to do about a build without CUDA
  const Stream stream = current_stream(out, at);
  const nb::gil_scoped_release no_gil;
  merge(kFunction, call, device, stream);
}

}  // namespace

void bind_merge(nb::module_& module) {
  module.def("merge", &merge_into, nb::arg("out"), nb::arg("state").none(), nb::arg("parts"), nb::arg("unit"),
             nb::arg("adds"));
  module.def("unit_of_scores", &unit_of_scores, nb::arg("scale"), nb::arg("softcap"), nb::arg("alibi"));
}

}  // namespace flashtile::bindings
