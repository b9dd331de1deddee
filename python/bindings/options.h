// This file takes the options of a call from the tuple that Python hands over.
#pragma once

#include <string>

#include "bindings.h"
#include "flashtile/kvcache.h"

namespace flashtile::bindings {

/// These are the options' indices in the tuple; the first two are tensors. kSequences is a tuple of tensors, or None
/// for a dense batch.
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

  // Calls on a cache have these after kSoftcap.
  kRotaryInterleaved = kSoftcap + 1,
  kNumSplits,
  kBatchInvariant,
  kReturnLse,
  kCacheOptionCount
};

inline nb::handle option_of(const nb::tuple& options, Option option) {
  return PyTuple_GetItem(options.ptr(), static_cast<Py_ssize_t>(option));
}

/// Returns what messages say of any Python object, in a few words: as it is written, or the type and shape of an array.
std::string described(nb::handle object);

/// These convert the options that are scalars. They throw InvalidType, which names the option that has the wrong type.
Options to_options(const char* function, const nb::tuple& options);
KvcacheOptions to_cache_options(const char* function, const nb::tuple& options);
bool returns_lse(const char* function, const nb::tuple& cache_options);

}  // namespace flashtile::bindings
