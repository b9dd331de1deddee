// This file declares the Python module, one topic per source file. It converts and forwards; every decision is the
// library's.
#pragma once

#include <nanobind/nanobind.h>

namespace flashtile::bindings {

namespace nb = nanobind;

void bind_errors(nb::module_& module);     // errors.cpp
void bind_tensor(nb::module_& module);     // tensor.cpp
void bind_options(nb::module_& module);    // options.cpp
void bind_attention(nb::module_& module);  // attention.cpp
void bind_kvcache(nb::module_& module);    // kvcache.cpp
void bind_explain(nb::module_& module);    // explain.cpp
void bind_quantize(nb::module_& module);   // quantize.cpp
void bind_merge(nb::module_& module);      // merge.cpp
void bind_counters(nb::module_& module);   // counters.cpp
void bind_xla(nb::module_& module);        // xla.cpp
void bind_info(nb::module_& module);       // info.cpp

}  // namespace flashtile::bindings
