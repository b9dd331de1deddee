// This file declares what options do to a problem.
#pragma once

#include <string>

#include "flashtile/problem.h"

namespace flashtile {

/// Checks options, and sets what they say of a problem whose head_dim is known. Throws InvalidArgument for an illegal
/// value.
void check_options(const char* function, const Options& options, Problem& problem);

/// Returns the options as text for people: "causal, scale 0.125, softcap 30".
std::string options_string(const Problem& problem);

}  // namespace flashtile
