// Options of a call, from the tuple that Python hands over.
#pragma once

#include "bindings.h"
#include "flashtile/problem.h"

namespace flashtile::bindings {

/// Where each option stands in the tuple; the first two are tensors, the last one is a tuple of them, or None: dense.
enum Option : std::size_t {
  kAlibiSlopes,
  kSinks,
  kCausal,
  kWindow,
  kScale,
  kSoftcap,
  kDropoutP,
  kSeed,
  kDeterministic,
  kSequences,
  kOptionCount
};

inline nb::handle option_of(const nb::tuple& options, Option option) {
  return PyTuple_GetItem(options.ptr(), static_cast<Py_ssize_t>(option));
}

/// Those that are scalars. Throws InvalidType naming the option that is not of its type.
Options to_options(const char* function, const nb::tuple& options);

}  // namespace flashtile::bindings
