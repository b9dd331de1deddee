// This file binds facts about this build and this machine.
#include "bindings.h"
#include "cpu.h"
#include "flashtile/flashtile.h"

namespace flashtile::bindings {
namespace {

template <typename Rows>
nb::list names_of(const Rows& rows) {
  nb::list names;
  for (const auto& row : rows)
    if (row.run) names.append(nb::str(name_of(row.variant).c_str()));
  return names;
}

nb::dict info() {
  const DeviceInfo& device = device_info({DeviceType::kCpu, 0});
  nb::dict facts;
  facts["built_with_cuda"] = built_with_cuda();
  facts["cuda_architectures"] = cuda_architectures();
  facts["cpu"] = device.name.c_str();
  facts["cpu_threads"] = device.threads;
  facts["cpu_instruction_set"] = cpu::name_of(cpu::instruction_set());
  facts["forward_kernels"] = names_of(forward_rows());
  facts["backward_kernels"] = names_of(backward_rows());
  return facts;
}

}  // namespace

void bind_info(nb::module_& module) {
  module.def("info", &info);
  module.attr("CUDA_REMEDY") = kCudaRemedy;
}

}  // namespace flashtile::bindings
