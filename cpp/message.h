// This file gives every refusal its form: "attention: k has shape (2, 100, 3, 128), expected (2, 100, 4, 128) = (B,
// S_k, H_k, D)".
#pragma once

#include <cstdio>
#include <string>

namespace flashtile {

/// Throws `Error` in the name of `function`, about `subject`; it says what was found and what was expected instead.
template <class Error>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* function, const char* subject, const std::string& found,
                                                   const std::string& expected) {
  throw Error(std::string(function) + ": " + subject + " " + found + ", expected " + expected);
}

/// Returns the number as Python prints short ones: "1e+39", "-0.5", "nan".
inline std::string number_string(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

}  // namespace flashtile
