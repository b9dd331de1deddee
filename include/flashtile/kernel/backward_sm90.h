// These are the backward kernels for Hopper. Heads that are not wide take one pass over the scores. Where the
// accumulators of a key block leave no registers for dQ, a second pass forms it.
#pragma once

#include "flashtile/kernel/backward_one_pass_sm90.h"
#include "flashtile/kernel/backward_two_pass_sm90.h"

namespace flashtile {

template <class Row>
void launch_backward_sm90(const BackwardPlan& plan, const BackwardTensors& tensors, void* memory, Stream stream) {
  if constexpr (Row::kVariant.two_passes())
    launch_backward_two_pass_sm90<Row>(plan, tensors, memory, stream);
  else
    launch_backward_one_pass_sm90<Row>(plan, tensors, memory, stream);
}

}  // namespace flashtile
