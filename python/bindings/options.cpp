#include "options.h"

#include <limits>
#include <string>

#include "call.h"
#include "flashtile/error.h"

namespace flashtile::bindings {
namespace {

[[noreturn]] void wrong_type(const char* function, const char* name, nb::handle found, const char* expected) {
  PyErr_Clear();
  throw InvalidType(std::string(function) + ": " + name + " is " + described(found) + ", expected " + expected);
}

bool to_bool(const char* function, const char* name, nb::handle object, const char* expected) {
  if (object.ptr() == Py_True) return true;
  if (object.ptr() == Py_False) return false;
  wrong_type(function, name, object, expected);
}

double to_double(const char* function, const char* name, nb::handle object, const char* expected) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred()) wrong_type(function, name, object, expected);
  return value;
}

/// Returns the distance; integers beyond 64 bits become the nearest one, as they all mean "unbounded".
std::optional<std::int64_t> to_distance(const char* function, const char* name, nb::handle object,
                                        const char* expected = "an int or None") {
  if (object.is_none()) return std::nullopt;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  if (overflow < 0) return std::numeric_limits<std::int64_t>::min();
  if (value == -1 && PyErr_Occurred()) wrong_type(function, name, object, expected);
  return value;
}

/// Returns the seed, which is 0 for None.
std::uint64_t to_seed(const char* function, nb::handle object) {
  if (object.is_none()) return 0;
  const nb::object index = nb::steal(PyNumber_Index(object.ptr()));
  const unsigned long long value = index.is_valid() ? PyLong_AsUnsignedLongLong(index.ptr()) : 0;
  if (PyErr_Occurred()) wrong_type(function, "seed", object, "an int from 0 to 2^64 - 1 or None");
  return value;
}

void to_window(const char* function, nb::handle window, Options& options) {
  if (window.is_none()) return;
  if (!PyTuple_Check(window.ptr()) || nb::len(window) != 2)
    wrong_type(function, "window", window, "None or a tuple (left, right) of int or None");
  options.window_left = to_distance(function, "window[0]", nb::object(window[0]));
  options.window_right = to_distance(function, "window[1]", nb::object(window[1]));
}

/// Returns the count; integers beyond 64 bits become the nearest one, which no call accepts either.
std::int64_t to_count(const char* function, const char* name, nb::handle object) {
  if (object.is_none()) wrong_type(function, name, object, "an int of at least 0");
  return *to_distance(function, name, object, "an int of at least 0");
}

/// Returns the options that attention over a cache has as well.
Options to_score_options(const char* function, const nb::tuple& given) {
  const auto at = [&](Option option) { return option_of(given, option); };
  Options options;
  options.causal = to_bool(function, "causal", at(kCausal), "True or False");
  to_window(function, at(kWindow), options);
  if (!at(kScale).is_none()) options.scale = to_double(function, "scale", at(kScale), "a number or None");
  options.softcap = to_double(function, "softcap", at(kSoftcap), "a number");
  return options;
}

/// Returns `object` as Python writes it, in one line.
nb::str written(nb::handle object) {
  return nb::borrow<nb::str>(nb::str(" ").attr("join")(nb::repr(object).attr("split")()));
}

}  // namespace

std::string described(nb::handle object) try {
  constexpr Py_ssize_t kLength = 80;
  const nb::object shape = nb::getattr(object, "shape", nb::none());
  const std::string sizes = nb::isinstance<nb::tuple>(shape) ? nb::repr(nb::tuple(shape)).c_str() : "()";
  if (nb::isinstance(object, nb::module_::import_("torch").attr("Tensor"))) return "a tensor of shape " + sizes;
  if (sizes != "()") return std::string("of type ") + nb::type_name(object.type()).c_str() + " and shape " + sizes;
  const nb::str text = written(object);
  if (PyUnicode_GetLength(text.ptr()) <= kLength) return text.c_str();
  return std::string(nb::str(text[nb::slice(kLength)]).c_str()) + "...";
} catch (const nb::python_error&) {
  return std::string("of type ") + nb::type_name(object.type()).c_str();
}

Options to_options(const char* function, const nb::tuple& given) {
  const auto at = [&](Option option) { return option_of(given, option); };
  Options options = to_score_options(function, given);
  options.dropout_p = to_double(function, "dropout_p", at(kDropoutP), "a number");
  options.seed = to_seed(function, at(kSeed));
  if (!at(kDeterministic).is_none())
    options.deterministic = to_bool(function, "deterministic", at(kDeterministic), "True, False or None");
  return options;
}

KvcacheOptions to_cache_options(const char* function, const nb::tuple& given) {
  const auto to_choice = [&](const char* name, Option option) {
    return to_bool(function, name, option_of(given, option), "True or False");
  };
  return {
      .attention = to_score_options(function, given),
      .rotary_interleaved = to_choice("rotary_interleaved", kRotaryInterleaved),
      .num_splits = to_count(function, "num_splits", option_of(given, kNumSplits)),
      .batch_invariant = to_choice("batch_invariant", kBatchInvariant),
  };
}

bool returns_lse(const char* function, const nb::tuple& given) {
  return to_bool(function, "return_lse", option_of(given, kReturnLse), "True or False");
}

void bind_options(nb::module_& module) {
  module.def(
      "described", [](nb::handle object) { return nb::str(described(object).c_str()); }, nb::arg("object").none());
  // These two are for callers whose options go another way than through a call of this module.
  module.def(
      "check_options",
      [](const char* function, const nb::tuple& options) {
        check_count(function, options, kOptionCount, "options");
        to_options(function, options);
      },
      nb::arg("function"), nb::arg("options"));
  module.def(
      "check_cache_options",
      [](const char* function, const nb::tuple& options) {
        check_count(function, options, kCacheOptionCount, "options");
        to_cache_options(function, options);
        returns_lse(function, options);
      },
      nb::arg("function"), nb::arg("options"));
}

}  // namespace flashtile::bindings
