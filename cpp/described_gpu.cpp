// This file describes GPUs by name, as much as select knows of a device, so that plans can be made for a GPU that is
// not in this machine.
#include <cctype>
#include <cstdint>
#include <string>

#include "flashtile/flashtile.h"
#include "message.h"

namespace flashtile {
namespace {

struct Gpu {
  const char* name;
  int compute_capability;
  int multiprocessors;
  int l2_mib;  // size of the L2 cache
};

// A compute capability without a name stands for the first GPU listed with it.
constexpr Gpu kGpus[] = {
    {"A100", 80, 108, 40},   {"A30", 80, 56, 24},        {"A40", 86, 84, 6},         {"A10", 86, 72, 6},
    {"RTX 3090", 86, 82, 6}, {"RTX 4090", 89, 128, 72},  {"L40S", 89, 142, 96},      {"L4", 89, 58, 48},
    {"H100", 90, 132, 50},   {"H100 PCIe", 90, 114, 50}, {"H200", 90, 132, 60},      {"GH200", 90, 132, 60},
    {"H20", 90, 78, 60},     {"B200", 100, 148, 126},    {"RTX 5090", 120, 170, 96}, {"V100", 70, 80, 6},
    {"T4", 75, 40, 4},
};

/// Returns the KiB of shared memory that one thread block may ask for.
int shared_memory_kib(int compute_capability) {
  switch (compute_capability) {
    case 70: return 96;
    case 75: return 64;
    case 80: return 163;
    case 90:
    case 100: return 227;
    default: return 99;
  }
}

/// Returns letters and digits alone, in lower case: "RTX 4090" and "rtx-4090", "9.0" and "90" are the same.
std::string plain(const std::string& name) {
  std::string text;
  for (const unsigned char c : name)
    if (std::isalnum(c)) text += static_cast<char>(std::tolower(c));
  return text;
}

std::string without_prefix(const std::string& text, const std::string& prefix) {
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

}  // namespace

DeviceInfo described_gpu(const std::string& name) {
  const std::string wanted = without_prefix(plain(name), "nvidia");
  std::string names;
  for (const Gpu& gpu : kGpus) {
    const std::string capability = std::to_string(gpu.compute_capability);
    if (wanted == plain(gpu.name) || without_prefix(wanted, "sm") == capability)
      return {.device = {DeviceType::kCuda, 0},
              .name = gpu.name,
              .compute_capability = gpu.compute_capability,
              .multiprocessors = gpu.multiprocessors,
              .max_shared_memory = shared_memory_kib(gpu.compute_capability) * 1024,
              .l2_bytes = std::int64_t{gpu.l2_mib} << 20};
    names += std::string(gpu.name) + ", ";
  }
  refuse<InvalidArgument>("explain", "device", "is " + name,
                          "cpu, cuda, " + names + "or a compute capability of theirs, such as 9.0");
}

}  // namespace flashtile
