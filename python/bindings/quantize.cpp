// This file binds the rounding to fp8.
#include "flashtile/quantize.h"

#include <nanobind/stl/array.h>

#include "bindings.h"
#include "call.h"
#include "tensor.h"

namespace flashtile::bindings {
namespace {

void quantize_into(const char* function, nb::handle x, nb::handle numbers, nb::handle descale, int block, bool rotates,
                   const Signs& signs) {
  const Quantization quantization{.x = tensor_view(function, "x", x),
                                  .numbers = tensor_view(function, "numbers", numbers, kInts),
                                  .descale = tensor_view(function, "descale", descale),
                                  .block = block,
                                  .rotates = rotates,
                                  .signs = signs};
  device_for(function, quantization.x.device);  // which says what to do about a build without CUDA
  const Stream stream = current_stream(x, quantization.x.device);
  const nb::gil_scoped_release no_gil;
  quantize(function, quantization, stream);
}

}  // namespace

void bind_quantize(nb::module_& module) {
  module.def("quantize", &quantize_into, nb::arg("function"), nb::arg("x"), nb::arg("numbers"), nb::arg("descale"),
             nb::arg("block"), nb::arg("rotates"), nb::arg("signs"));
}

}  // namespace flashtile::bindings
