// This file binds explain, which asks how a call would be computed. The call itself answers, so that it is checked,
// cast and copied as always.
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>

#include "call.h"
#include "flashtile/flashtile.h"

namespace flashtile::bindings {
namespace {

/// This is what explain asks of the calls of this thread.
struct Question {
  std::optional<DeviceInfo> device;
  std::uintptr_t memories = 0;  // addresses that planned_memory has returned
};

thread_local Question* question = nullptr;
PyObject* explained_type = nullptr;  // lives as long as the process

/// Returns N of "cuda:N", and 0 of "cuda", where `type` is "cuda".
std::optional<int> index_in(const std::string& name, const std::string& type) {
  if (name == type) return 0;
  if (!name.starts_with(type + ":")) return std::nullopt;
  int index = -1;
  const char* const last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + type.size() + 1, last, index);
  if (error != std::errc() || end != last || index < 0) return std::nullopt;
  return index;
}

/// Returns the CPU or a GPU of this machine, or a GPU that is described by its name, which `heading` then describes.
DeviceInfo device_named(const std::string& name, std::string& heading) {
  if (index_in(name, "cpu")) return device_for("explain", {});
  if (const auto index = index_in(name, "cuda")) return device_for("explain", {DeviceType::kCuda, *index});
  const DeviceInfo gpu = described_gpu(name);
  const int cc = gpu.compute_capability;
  heading = "on the GPU " + gpu.name + ": compute capability " + std::to_string(cc / 10) + "." +
            std::to_string(cc % 10) + ", " + std::to_string(gpu.multiprocessors) + " multiprocessors\n";
  return gpu;
}

/// Runs `function` and returns what its first call of a kernel says, or None if it makes none.
nb::object explain(const nb::callable& function, nb::handle device, const nb::args& arguments,
                   const nb::kwargs& options) {
  struct Scope {
    Question asked;
    ~Scope() { question = nullptr; }
  } scope;
  std::string heading;
  if (!device.is_none()) scope.asked.device = device_named(nb::str(device).c_str(), heading);
  question = &scope.asked;
  try {
    function(*arguments, **options);
  } catch (nb::python_error& error) {
    if (!error.matches(explained_type)) throw;
    return nb::str(heading.c_str()) + error.value().attr("args")[0];
  }
  return nb::none();
}

}  // namespace

bool explaining() {
  return question != nullptr;
}

const DeviceInfo* planned_device() {
  return question != nullptr && question->device ? &*question->device : nullptr;
}

void* planned_memory() {
  constexpr int kApart = 56;  // addresses are 2^56 bytes apart, more than any tensor has
  return reinterpret_cast<void*>(++question->memories << kApart);
}

void bind_explain(nb::module_& module) {
  // It derives from BaseException alone, so that no function between explain and the call catches it.
  explained_type = PyErr_NewException("flashtile._C.Explained", PyExc_BaseException, nullptr);
  if (!explained_type) throw nb::python_error();
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const Explained& explained) {
      PyErr_SetString(explained_type, explained.text.c_str());
    }
  });
  module.def("explain", &explain, nb::arg("function"), nb::arg("device").none(), nb::arg("args"), nb::arg("kwargs"));
}

}  // namespace flashtile::bindings
