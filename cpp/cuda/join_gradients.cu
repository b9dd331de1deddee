#include "flashtile/join_gradients.h"

#include "flashtile/cuda/constants.h"
#include "flashtile/math/element.h"

namespace flashtile {
namespace {

struct JoinParams {
  BackwardParams backward;
  GradientJoin join;
};

template <class Element>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(const __grid_constant__ JoinParams params) {
  let_next_kernel_start();
  if (threadIdx.x / 32 == 0) prefetch_constants(params);
  join_gradients<Element>(params.backward, params.join, blockIdx.x);
}

}  // namespace

void join_gradients(BackwardPlan const& plan, BackwardParams const& params, Stream stream) {
  static KernelHandles f16, bf16;
  const JoinParams join{params, GradientJoin::of(plan, params)};
  const LaunchShape shape = {join.join.grid, kJoinThreads, 0, plan.variant.arch == Arch::kSm90};
  plan.variant.dtype == DType::kFloat16
      ? launch(join_kernel<ElementOf<DType::kFloat16>>, f16, plan.problem.device, shape, join, stream)
      : launch(join_kernel<ElementOf<DType::kBFloat16>>, bf16, plan.problem.device, shape, join, stream);
}

}  // namespace flashtile
