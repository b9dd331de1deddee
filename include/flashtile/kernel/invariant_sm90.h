// Batch-invariant calls take Hopper's forward kernel with fixed parts: over keys in rows, dense and ragged, or over a
// cache, of which a contiguous one has a page for each sequence.
#pragma once

#include "flashtile/fixed_parts.h"
#include "flashtile/kernel/paged_sm90.h"

namespace flashtile {

template <class Params>
InFixedParts<Params> in_fixed_parts(const ForwardPlan& plan, Params params, int keys_of_sequence, void* memory) {
  params.forward.parts = FixedParts::results(plan, keys_of_sequence, memory);
  return {params, FixedParts::of(plan, keys_of_sequence, memory)};
}

/// Launches the forward kernel over keys in rows. Rows of few queries serve tiles that are shared out, and no others.
template <class Row>
void launch_invariant_sm90(const ForwardPlan& plan, const ForwardTensors& tensors, void* memory, Stream stream) {
  static KernelHandles plain, mapped, shared;
  using Mainloop = ForwardMainloopSm90<Row::kVariant, Keys::kFixedParts>;
  const auto params =
      in_fixed_parts(plan, forward_params_sm90<Mainloop>(plan, tensors, memory), plan.problem.seqlen_k, memory);
  const LaunchShape shape{plan.grid, Row::kVariant.threads(), plan.shared_memory, plan.problem.ragged};
  const Device device = plan.problem.device;
  if (plan.lists) order_tiles(params.forward.sequences, params.forward.ragged, device, stream);
  if constexpr (may_share_tiles(Row::kVariant)) {
    if (plan.splits > 1) {
      launch(forward_sm90<Row, Keys::kFixedPartsSplit, Maps::kAsAsked>, shared, device, shape, params, stream);
      return join_fixed_parts(plan, params.forward, params.parts, {}, stream);
    }
  }
  if constexpr (!has_few_queries(Row::kVariant)) {
    if (params.forward.scores.map.maps())
      launch(forward_sm90<Row, Keys::kFixedParts, Maps::kAsAsked>, mapped, device, shape, params, stream);
    else
      launch(forward_sm90<Row, Keys::kFixedParts, Maps::kNever>, plain, device, shape, params, stream);
  }
}

/// Launches the forward kernel over a cache, for prefill().
template <class Row>
void launch_invariant_over_pages_sm90(const KvcachePlan& plan, const KvcacheTensors& cached,
                                      const ForwardTensors& tensors, void* memory, Stream stream) {
  static KernelHandles plain, mapped, shared;
  using Mainloop = ForwardMainloopSm90<Row::kVariant, Keys::kInFixedPartsOfPages>;
  const ForwardPlan& forward = *plan.prefill;
  const auto params = in_fixed_parts(forward, paged_params_sm90<Mainloop>(Row::kVariant, plan, cached, tensors, memory),
                                     plan.problem.seqlen_k, memory);
  const LaunchShape shape{forward.grid, Row::kVariant.threads(), forward.shared_memory, forward.problem.ragged};
  const Device device = forward.problem.device;
  if (forward.lists) order_tiles(params.forward.sequences, params.forward.ragged, device, stream);
  if constexpr (may_share_tiles(Row::kVariant)) {
    if (forward.splits > 1) {
      launch(forward_sm90<Row, Keys::kFixedPartsOfPagesSplit, Maps::kAsAsked>, shared, device, shape, params, stream);
      return join_fixed_parts(forward, params.forward, params.parts, params.rows, stream);
    }
  }
  if (params.forward.scores.map.maps())
    launch(forward_sm90<Row, Keys::kInFixedPartsOfPages, Maps::kAsAsked>, mapped, device, shape, params, stream);
  else
    launch(forward_sm90<Row, Keys::kInFixedPartsOfPages, Maps::kNever>, plain, device, shape, params, stream);
}

}  // namespace flashtile
