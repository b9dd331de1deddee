#include "flashtile/quantize.h"

#include "device.h"
#include "flashtile/error.h"

namespace flashtile {
namespace {

/// Throws Unreadable unless each run of 8 elements of x lies at a multiple of 16 bytes.
void check_readable(const char* function, const TensorView& x) {
  constexpr int kVector = 8;
  bool aligned = x.strides[x.rank - 1] == 1 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
  for (int i = 0; i < x.rank - 1; ++i) aligned = aligned && (x.shape[i] < 2 || x.strides[i] % kVector == 0);
  if (!aligned && !x.empty())
    throw Unreadable(std::string(function) + ": a tensor's rows do not lie at multiples of 16 bytes");
}

#ifndef FLASHTILE_WITH_CUDA
[[noreturn]] void refuse(const char* function) {
  throw Unsupported(std::string(function) + ": this build has no CUDA");
}
#endif

}  // namespace

#ifdef FLASHTILE_WITH_CUDA
void launch_quantize(const QuantizeCall& call, int multiprocessors, Stream stream);  // cpp/cuda/quantize.cu
void launch_quantize_ragged(const RaggedQuantization& quantization, Stream stream);  // cpp/cuda/quantize_ragged.cu
#endif

void quantize(const char* function, const QuantizeCall& call, const DeviceInfo& device, Stream stream) {
  for (const Quantization& tensor : call.tensors) check_readable(function, tensor.x);
#ifdef FLASHTILE_WITH_CUDA
  const DeviceGuard guard(call.tensors[0].x.device);
  launch_quantize(call, device.multiprocessors, stream);
#else
  static_cast<void>(device), static_cast<void>(stream);
  refuse(function);
#endif
}

void quantize(const char* function, const RaggedQuantization& quantization, Stream stream) {
  check_readable(function, quantization.x);
#ifdef FLASHTILE_WITH_CUDA
  const DeviceGuard guard(quantization.x.device);
  launch_quantize_ragged(quantization, stream);
#else
  static_cast<void>(stream);
  refuse(function);
#endif
}

}  // namespace flashtile
