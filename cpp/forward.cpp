#include "device.h"
#include "flashtile/flashtile.h"
#include "max_logits.h"
#include "operand.h"

namespace flashtile {

ForwardPlan plan_forward(const char* function, const ForwardTensors& tensors, const Options& options,
                         const DeviceInfo& device, bool batch_invariant) {
  const ForwardTensors& t = tensors;
  // check_forward cannot do this: a backward has it look at an out that is read.
  check_place({function, "out", "", t.out},
              {{function, "q", "", t.q}, {function, "k", "", t.k}, {function, "v", "", t.v}});
  const Problem problem = check_forward(function, tensors, options);
  try {
    return select_forward(problem, device, batch_invariant);
  } catch (const Unsupported& error) {
    throw Unsupported(std::string(function) + ": " + error.what());
  }
}

void run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace, Stream stream) {
  clear_max_logits(plan.variant, tensors.out, tensors.max_logits, stream);
  if (tensors.out.empty()) return;
  if (plan.run == nullptr) refuse_without_cuda(name_of(plan.variant) + " is not in this build");
  const DeviceGuard guard(plan.problem.device);
  if (plan.problem.ragged) return plan.run(plan, tensors.with_batch(), workspace, stream);
  plan.run(plan, tensors, workspace, stream);
}

}  // namespace flashtile
