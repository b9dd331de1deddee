// Options of a call, from Python scalars.
#pragma once

#include "bindings.h"
#include "flashtile/problem.h"

namespace flashtile::bindings {

/// Throws InvalidType naming the option that is not of its type.
Options to_options(const char* function, nb::handle causal, nb::handle window, nb::handle scale, nb::handle softcap);

}  // namespace flashtile::bindings
