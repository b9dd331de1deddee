#include "flashtile/quantize.h"

#include "device.h"
#include "flashtile/error.h"

namespace flashtile {

#ifdef FLASHTILE_WITH_CUDA
void launch_quantize(const Quantization& quantization, Stream stream);  // cpp/cuda/quantize.cu
#endif

void quantize(const char* function, const Quantization& quantization, Stream stream) {
  const TensorView& x = quantization.x;
  constexpr int kVector = 8;  // elements that a thread reads at a time
  bool aligned = x.strides[3] == 1 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) aligned = aligned && (x.shape[i] < 2 || x.strides[i] % kVector == 0);
  if (!aligned && !x.empty())
    throw Unreadable(std::string(function) + ": a tensor's rows do not lie at multiples of 16 bytes");
#ifdef FLASHTILE_WITH_CUDA
  const DeviceGuard guard(x.device);
  launch_quantize(quantization, stream);
#else
  static_cast<void>(stream);
  throw Unsupported(std::string(function) + ": this build has no CUDA");
#endif
}

}  // namespace flashtile
