#include "options.h"

#include <iterator>
#include <limits>
#include <string>

#include "call.h"
#include "flashtile/error.h"
#include "tensor.h"

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

/// Returns the integer; those beyond 64 bits become the nearest one. As a distance it is as far beyond any length, and
/// as a count no call accepts it either.
std::int64_t to_int64(const char* function, const char* name, nb::handle object, const char* expected) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  if (overflow < 0) return std::numeric_limits<std::int64_t>::min();
  if (value == -1 && PyErr_Occurred()) wrong_type(function, name, object, expected);
  return value;
}

std::optional<std::int64_t> to_distance(const char* function, const char* name, nb::handle object) {
  if (object.is_none()) return std::nullopt;
  return to_int64(function, name, object, "an int or None");
}

/// A Reader reads options out of a tuple, one after the other, each by its type. None leaves an option that may be
/// left out as it is.
class Reader {
 public:
  Reader(const char* function, const nb::tuple& given) : function_(function), given_(given) {}

  void operator()(const char* name, bool& value) { value = to_bool(function_, name, next(), "True or False"); }
  void operator()(const char* name, std::optional<bool>& value) {
    const nb::handle object = next();
    if (!object.is_none()) value = to_bool(function_, name, object, "True, False or None");
  }
  void operator()(const char* name, double& value) { value = to_double(function_, name, next(), "a number"); }
  void operator()(const char* name, std::optional<double>& value) {
    const nb::handle object = next();
    if (!object.is_none()) value = to_double(function_, name, object, "a number or None");
  }
  void operator()(const char* name, std::int64_t& value) {
    value = to_int64(function_, name, next(), "an int of at least 0");
  }
  void operator()(const char* name, std::uint64_t& value) {
    const nb::handle object = next();
    if (object.is_none()) return;
    const nb::object index = nb::steal(PyNumber_Index(object.ptr()));
    value = index.is_valid() ? PyLong_AsUnsignedLongLong(index.ptr()) : 0;
    if (PyErr_Occurred()) wrong_type(function_, name, object, "an int from 0 to 2^64 - 1 or None");
  }
  void operator()(const char* name, std::optional<std::int64_t>& left, std::optional<std::int64_t>& right) {
    const nb::handle window = next();
    if (window.is_none()) return;
    if (!PyTuple_Check(window.ptr()) || nb::len(window) != 2)
      wrong_type(function_, name, window, "None or a tuple (left, right) of int or None");
    left = to_distance(function_, "window[0]", nb::object(window[0]));
    right = to_distance(function_, "window[1]", nb::object(window[1]));
  }

 private:
  nb::handle next() { return option_of(given_, place_++); }

  const char* function_;
  const nb::tuple& given_;
  std::size_t place_ = kFirstValue;
};

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

AttentionOptions to_options(const char* function, const nb::tuple& given) {
  AttentionOptions options;
  options.each(Reader(function, given));
  return options;
}

KvcacheOptions to_cache_options(const char* function, const nb::tuple& given) {
  KvcacheOptions options;
  options.each(Reader(function, given));
  return options;
}

bool returns_lse(const char* function, const nb::tuple& given) {
  return to_bool(function, "return_lse", option_of(given, kReturnLse), "True or False");
}

void to_place(const char* function, const nb::tuple& given, Options& options) {
  if (nb::len(given) == kPlace) return;
  const nb::handle place = option_of(given, kPlace);
  int* const values[] = {&options.first.batch, &options.first.head, &options.first.row, &options.first.column,
                         &options.ahead};
  check_count(function, place, std::size(values), "places");
  for (std::size_t i = 0; i < std::size(values); ++i)
    *values[i] = static_cast<int>(to_int64(function, "place", option_of(nb::borrow<nb::tuple>(place), i), "ints"));
}

DType to_out_dtype(const char* function, nb::handle object) {
  if (object.is_none()) return DType::kOther;
  const DType dtype = to_dtype(object);
  if (dtype == DType::kOther) wrong_type(function, "out_dtype", object, "bfloat16, float16, or float32 on a CPU");
  return dtype;
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
