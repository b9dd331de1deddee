// This file says which Python exception each C++ error becomes.
#include "flashtile/error.h"

#include "bindings.h"

namespace flashtile::bindings {
namespace {

PyObject* unreadable_type = nullptr;  // lives as long as the process

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const InvalidType& e) {
    PyErr_SetString(PyExc_TypeError, e.what());
  } catch (const Unreadable& e) {  // must stand before its base, Unsupported
    PyErr_SetString(unreadable_type, e.what());
  } catch (const Unsupported& e) {
    PyErr_SetString(PyExc_NotImplementedError, e.what());
  } catch (const CudaError& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  unreadable_type = PyErr_NewException("flashtile._C.Unreadable", PyExc_NotImplementedError, nullptr);
  if (!unreadable_type) throw nb::python_error();
  module.attr("Unreadable") = nb::handle(unreadable_type);
  nb::register_exception_translator(translate);
}

}  // namespace flashtile::bindings
