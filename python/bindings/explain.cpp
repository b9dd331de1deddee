// How a call would be computed, which the call itself says: so it is checked, cast and copied as always.
#include "call.h"

namespace flashtile::bindings {
namespace {

thread_local bool explaining_here = false;
PyObject* explained_type = nullptr;  // lives as long as the process

/// What the first call of a kernel says that `function` makes.
nb::object explain(const nb::callable& function, const nb::args& arguments, const nb::kwargs& options) {
  struct Scope {
    Scope() { explaining_here = true; }
    ~Scope() { explaining_here = false; }
  } scope;
  try {
    function(*arguments, **options);
  } catch (nb::python_error& error) {
    if (!error.matches(explained_type)) throw;
    return error.value().attr("args")[0];
  }
  return nb::none();
}

}  // namespace

bool explaining() {
  return explaining_here;
}

void bind_explain(nb::module_& module) {
  // Of no class that the functions between here and the call catch.
  explained_type = PyErr_NewException("flashtile._C.Explained", PyExc_BaseException, nullptr);
  if (!explained_type) throw nb::python_error();
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const Explained& explained) {
      PyErr_SetString(explained_type, explained.text.c_str());
    }
  });
  module.def("explain", &explain, nb::arg("function"), nb::arg("args"), nb::arg("kwargs"));
}

}  // namespace flashtile::bindings
