// This file sets the device of a launch, and refuses one where this build has no kernels for it.
#pragma once

#include <string>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// Throws Unsupported, which says `what`, that this build holds no CUDA kernels, and what to do about it.
[[noreturn, gnu::cold]] void refuse_without_cuda(const std::string& what);

/// Makes a problem's device the current one for as long as a launch takes.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // the device to go back to; -1: none
};

}  // namespace flashtile
