// This file binds the rounding to fp8.
#include "flashtile/quantize.h"

#include <nanobind/stl/array.h>

#include "bindings.h"
#include "call.h"
#include "tensor.h"

namespace flashtile::bindings {
namespace {

const char* name_of_place(int i) {
  return i == 0 ? "q" : i == 1 ? "k" : "v";
}

/// `tensors`, `numbers` and `descales` are of queries, keys and values; of these queries and keys may be rotated.
void quantize_into(const char* function, const nb::tuple& tensors, const nb::tuple& numbers, const nb::tuple& descales,
                   int block, bool rotates, const Signs& signs) {
  for (const nb::tuple& tuple : {tensors, numbers, descales}) check_count(function, tuple, 3, "tensors");
  QuantizeCall call{.tensors = {}, .block = block, .signs = signs};
  for (int i = 0; i < 3; ++i)
    call.tensors[i] = {.x = tensor_view(function, name_of_place(i), tensors[i]),
                       .numbers = tensor_view(function, "numbers", numbers[i], kInts),
                       .descale = tensor_view(function, "descale", descales[i]),
                       .rotates = rotates && i < 2};
  const Device at = call.tensors[0].x.device;
  const DeviceInfo device = device_for(function, at);  // which says what to do about a build without CUDA
  const Stream stream = current_stream(tensors[0], at);
  const nb::gil_scoped_release no_gil;
  quantize(function, call, device, stream);
}

void quantize_ragged_into(const char* function, nb::handle x, nb::handle begins, nb::handle numbers, nb::handle descale,
                          nb::handle largest, bool rotates, const Signs& signs) {
  const RaggedQuantization quantization{.x = tensor_view(function, "x", x),
                                        .begins = tensor_view(function, "begins", begins, kInts),
                                        .numbers = tensor_view(function, "numbers", numbers, kInts),
                                        .descale = tensor_view(function, "descale", descale),
                                        .largest = tensor_view(function, "largest", largest, kInts),
                                        .rotates = rotates,
                                        .signs = signs};
  device_for(function, quantization.x.device);  // which says what to do about a build without CUDA
  const Stream stream = current_stream(x, quantization.x.device);
  const nb::gil_scoped_release no_gil;
  quantize(function, quantization, stream);
}

}  // namespace

void bind_quantize(nb::module_& module) {
  module.def("quantize", &quantize_into, nb::arg("function"), nb::arg("tensors"), nb::arg("numbers"),
             nb::arg("descales"), nb::arg("block"), nb::arg("rotates"), nb::arg("signs"));
  module.def("quantize_ragged", &quantize_ragged_into, nb::arg("function"), nb::arg("x"), nb::arg("begins"),
             nb::arg("numbers"), nb::arg("descale"), nb::arg("largest"), nb::arg("rotates"), nb::arg("signs"));
}

}  // namespace flashtile::bindings
