// This file lists what can go wrong, by who can mend it. The Python layer maps each type to one built-in exception.
#pragma once

#include <stdexcept>
#include <string>

namespace flashtile {

/// An argument breaks the contract (Python: ValueError).
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// An argument has the wrong dtype or is not a tensor (Python: TypeError).
struct InvalidType : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// The request is legal, but no kernel serves it; the message names the nearest request that is served (Python:
/// NotImplementedError).
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The request is legal, but no kernel can read an operand as it lies in memory; a contiguous copy of it could be read.
/// The Python layer makes that copy and tries again, so users see this error only for caches, which are written in
/// place.
struct Unreadable : Unsupported {
  using Unsupported::Unsupported;
};

/// The CUDA runtime failed (Python: RuntimeError).
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace flashtile
