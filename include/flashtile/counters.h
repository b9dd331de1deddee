// This file lets streams of several GPUs wait for each other without a kernel: one writes a counter in memory that all
// of them can reach, another waits until it has got so far. A GPU's front end does both, and needs no multiprocessor.
#pragma once

#include <cstdint>
#include <vector>

#include "flashtile/tensor_view.h"

namespace flashtile {

/// Counters are the addresses of counters of 32 bits, which may be another GPU's. What a stream did before it writes a
/// counter, other GPUs see before they see the counter. A stream waits until each counter is at `value` or up to 2³¹
/// beyond.
struct Counters {
  std::vector<std::uint64_t> addresses;
  std::uint32_t value;
};

/// Both are put on `stream` of `device`. A build without CUDA refuses them.
void write_counters(const Counters& counters, Device device, Stream stream);
void wait_for_counters(const Counters& counters, Device device, Stream stream);

}  // namespace flashtile
