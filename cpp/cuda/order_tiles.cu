#include "flashtile/order_tiles.h"

#include "flashtile/cuda/launch.h"
#include "flashtile/scheduler/list_tiles.h"

namespace flashtile {
namespace {

constexpr int kThreads = 1024;
static_assert(kThreads >= RaggedOrder::kClasses);

struct OrderParams {
  Sequences sequences;
  RaggedOrder order;
};

__global__ void __launch_bounds__(kThreads) order_tiles_kernel(const __grid_constant__ OrderParams params) {
  let_next_kernel_start();
  list_tiles(params.sequences, params.order);
}

}  // namespace

void order_tiles(const Sequences& sequences, const RaggedOrder& order, Device device, Stream stream) {
  static KernelHandles handles;
  launch(order_tiles_kernel, handles, device, {1, kThreads, 0}, OrderParams{sequences, order}, stream);
}

}  // namespace flashtile
