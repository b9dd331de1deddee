// Makes a problem's device the current one for as long as a launch takes.
#pragma once

#include "flashtile/tensor_view.h"

namespace flashtile {

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
