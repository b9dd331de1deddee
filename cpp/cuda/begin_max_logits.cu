#include "flashtile/begin_max_logits.h"

#include <limits>

#include "flashtile/cuda/launch.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256;

struct BeginParams {
  float* max_logits;
  std::int64_t count;
};

__global__ void __launch_bounds__(kThreads) begin_max_logits_kernel(const __grid_constant__ BeginParams params) {
  let_next_kernel_start();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < params.count) params.max_logits[i] = -std::numeric_limits<float>::infinity();
}

}  // namespace

void begin_max_logits(const LargestScores& largest, int batch, Device device, Stream stream) {
  static KernelHandles handles;
  const BeginParams params{largest.of_heads, std::int64_t{batch} * largest.heads};
  const int blocks = static_cast<int>((params.count + kThreads - 1) / kThreads);
  launch(begin_max_logits_kernel, handles, device, {blocks, kThreads, 0}, params, stream);
}

}  // namespace flashtile
