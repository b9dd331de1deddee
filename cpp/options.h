// What options make of a problem.
#pragma once

#include <string>

#include "flashtile/problem.h"

namespace flashtile {

/// All that options say of a problem whose head_dim is known. Throws InvalidArgument where a value is illegal.
void check_options(const char* function, const Options& options, Problem& problem);

/// The same for people: "causal, scale 0.125, softcap 30".
std::string options_string(const Problem& problem);

}  // namespace flashtile
