#include "flashtile/counters.h"

#include "device.h"

#ifdef FLASHTILE_WITH_CUDA
#include "flashtile/cuda/driver.h"
#endif

namespace flashtile {

#ifdef FLASHTILE_WITH_CUDA
namespace {

CUstreamBatchMemOpParams written(std::uint64_t address, std::uint32_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32,
                          .address = address,
                          .value = value,
                          .flags = CU_STREAM_WRITE_VALUE_DEFAULT,
                          .alias = 0};
  return operation;
}

CUstreamBatchMemOpParams reached(std::uint64_t address, std::uint32_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.waitValue = {.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32,
                         .address = address,
                         .value = value,
                         .flags = CU_STREAM_WAIT_VALUE_GEQ,
                         .alias = 0};
  return operation;
}

template <class MakeOperation>
void enqueue(const Counters& counters, Device device, Stream stream, MakeOperation make_operation) {
  if (counters.addresses.empty()) return;
  constexpr const char* kName = "cuStreamBatchMemOp";
  static const auto batch = driver_function<decltype(&cuStreamBatchMemOp)>(kName);
  std::vector<CUstreamBatchMemOpParams> operations;
  operations.reserve(counters.addresses.size());
  for (const std::uint64_t address : counters.addresses) operations.push_back(make_operation(address, counters.value));
  const DeviceGuard guard(device);
  call_driver(kName, device.index, [&] {
    return batch(static_cast<CUstream>(stream), static_cast<unsigned>(operations.size()), operations.data(), 0);
  });
}

}  // namespace

void write_counters(const Counters& counters, Device device, Stream stream) {
  enqueue(counters, device, stream, written);
}

void wait_for_counters(const Counters& counters, Device device, Stream stream) {
  enqueue(counters, device, stream, reached);
}
#else
void write_counters(const Counters&, Device, Stream) {
  refuse_without_cuda("a stream writes counters, expected none");
}

void wait_for_counters(const Counters&, Device, Stream) {
  refuse_without_cuda("a stream waits for counters, expected none");
}
#endif

}  // namespace flashtile
