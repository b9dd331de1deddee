// Options of a call, from Python scalars.
#pragma once

#include "bindings.h"
#include "flashtile/problem.h"

namespace flashtile::bindings {

/// From the tuple (causal, window, scale, softcap). Throws InvalidType naming the option that is not of its type.
Options to_options(const char* function, nb::tuple options);

}  // namespace flashtile::bindings
