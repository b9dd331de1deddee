// Options of a call, from the tuple that Python hands over.
#pragma once

#include <string>

#include "bindings.h"
#include "flashtile/kvcache.h"

namespace flashtile::bindings {

/// Where each option stands in the tuple; the first two are tensors. kSequences is a tuple of them, or None: dense.
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
  kOptionCount,

  // Of a cache, behind kSoftcap.
  kRotaryInterleaved = kSoftcap + 1,
  kNumSplits,
  kBatchInvariant,
  kReturnLse,
  kCacheOptionCount
};

inline nb::handle option_of(const nb::tuple& options, Option option) {
  return PyTuple_GetItem(options.ptr(), static_cast<Py_ssize_t>(option));
}

/// What messages say of any Python object, in a few words: as it is written, or the type and shape of an array.
std::string described(nb::handle object);

/// Those that are scalars. Throws InvalidType naming the option that is not of its type.
Options to_options(const char* function, const nb::tuple& options);
KvcacheOptions to_cache_options(const char* function, const nb::tuple& options);
bool returns_lse(const char* function, const nb::tuple& cache_options);

}  // namespace flashtile::bindings
