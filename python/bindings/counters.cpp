// This file binds what GPUs' streams wait for each other by.
#include "flashtile/counters.h"

#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace flashtile::bindings {
namespace {

using Enqueue = void (*)(const Counters&, Device, Stream);

/// `stream` is the address that torch.cuda.Stream.cuda_stream is.
template <Enqueue kEnqueue>
void enqueue(const std::vector<std::uint64_t>& addresses, std::uint32_t value, int device, std::uintptr_t stream) {
  kEnqueue({addresses, value}, {DeviceType::kCuda, device}, reinterpret_cast<Stream>(stream));
}

}  // namespace

void bind_counters(nb::module_& module) {
  const auto define = [&](const char* name, auto* function) {
    module.def(name, function, nb::arg("addresses"), nb::arg("value"), nb::arg("device"), nb::arg("stream"));
  };
  define("write_counters", &enqueue<&write_counters>);
  define("wait_for_counters", &enqueue<&wait_for_counters>);
}

}  // namespace flashtile::bindings
