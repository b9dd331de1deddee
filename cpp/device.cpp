#include "device.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string_view>

#include "flashtile/flashtile.h"

#ifdef FLASHTILE_WITH_CUDA
#include "flashtile/cuda/launch.h"
#endif

namespace flashtile {
namespace {

std::string cpu_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.starts_with("model name")) return line.substr(line.find(": ") + 2);
  return "CPU";
}

/// Returns how many cores this process may run on, or fewer where OMP_NUM_THREADS says so.
int cpu_threads() {
  cpu_set_t cores;
  int threads = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  int limit = 0;
  if (const char* text = std::getenv("OMP_NUM_THREADS"))
    std::from_chars(text, text + std::string_view(text).size(), limit);
  return limit > 0 ? std::min(threads, limit) : threads;
}

#ifdef FLASHTILE_WITH_CUDA
DeviceInfo read_cuda_device(int index) {
  cudaDeviceProp properties;
  throw_on_error(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  DeviceInfo info;
  info.device = {DeviceType::kCuda, index};
  info.name = properties.name;
  info.compute_capability = 10 * properties.major + properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.max_shared_memory = static_cast<int>(properties.sharedMemPerBlockOptin);
  info.l2_bytes = properties.l2CacheSize;
  return info;
}

const DeviceInfo& cuda_device_info(int index) {
  static std::array<DeviceInfo, kMaxDevices> infos;
  static std::array<std::once_flag, kMaxDevices> once;
  if (index < 0 || index >= kMaxDevices)
    throw Unsupported("device cuda:" + std::to_string(index) + ", expected an index below " +
                      std::to_string(kMaxDevices));
  std::call_once(once[index], [index] { infos[index] = read_cuda_device(index); });
  return infos[index];
}
#endif

}  // namespace

const DeviceInfo& device_info(Device device) {
  if (device.type == DeviceType::kCpu) {
    static const DeviceInfo cpu{.device = {}, .name = cpu_name(), .threads = cpu_threads()};
    return cpu;
  }
  if (device.type != DeviceType::kCuda)
    throw Unsupported("q is on " + name_of(device) + ", expected a CPU or a CUDA device");
#ifdef FLASHTILE_WITH_CUDA
  return cuda_device_info(device.index);
#else
  refuse_without_cuda("q is on " + name_of(device) + ", expected the CPU");
#endif
}

void refuse_without_cuda(const std::string& what) {
  throw Unsupported(what + ": flashtile was built without CUDA; " + kCudaRemedy);
}

bool built_with_cuda() {
#ifdef FLASHTILE_WITH_CUDA
  return true;
#else
  return false;
#endif
}

const char* cuda_architectures() {
#ifdef FLASHTILE_WITH_CUDA
  return FLASHTILE_CUDA_ARCHITECTURES;
#else
  return "";
#endif
}

#ifdef FLASHTILE_WITH_CUDA
DeviceGuard::DeviceGuard(Device device) {
  if (device.type != DeviceType::kCuda) return;
  int current = 0;
  throw_on_error(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device.index) return;
  throw_on_error(cudaSetDevice(device.index), "cudaSetDevice");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}
#else
DeviceGuard::DeviceGuard(Device) {}
DeviceGuard::~DeviceGuard() = default;
#endif

}  // namespace flashtile
