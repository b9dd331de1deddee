#include "device.h"
#include "flashtile/flashtile.h"

namespace flashtile {

BackwardPlan plan_backward(const char* function, const BackwardTensors& tensors, const Options& options,
                           const DeviceInfo& device, bool batch_invariant) {
  const Problem problem = check_backward(function, tensors, options);
  try {
    return select_backward(problem, device, batch_invariant);
  } catch (const Unsupported& error) {
    throw Unsupported(std::string(function) + ": " + error.what());
  }
}

void run_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace, Stream stream) {
  if (tensors.dq.empty() && tensors.dk.empty() && tensors.dv.empty() && tensors.dsinks.empty()) return;
  if (plan.run == nullptr) refuse_without_cuda(name_of(plan.variant) + " is not in this build");
  const DeviceGuard guard(plan.problem.device);
  if (plan.problem.ragged) return plan.run(plan, tensors.with_batch(), workspace, stream);
  plan.run(plan, tensors, workspace, stream);
}

}  // namespace flashtile
