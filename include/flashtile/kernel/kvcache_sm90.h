// Many queries over a cache in pages take Hopper's forward kernel, whose producer looks up where each page lies.
#pragma once

#include "flashtile/kernel/forward_sm90.h"
#include "flashtile/prefill.h"

namespace flashtile {

template <class Row>
void attend_to_pages(const KvcachePlan& plan, const KvcacheTensors& cached, const ForwardTensors& tensors, void* memory,
                     Stream stream) {
  using Mainloop = ForwardMainloopSm90<Row::kVariant, Keys::kInPages>;
  const ForwardPlan& forward = *plan.prefill;
  const int rows = rows_of_box(plan.cache, Row::kVariant);
  const PagedForwardParamsSm90 params{forward_params_sm90<Mainloop>(forward, tensors, memory, rows),
                                      plan.cache.layout(cached), plan.cache.rows(cached), rows};
  launch_forward_sm90<Row, Keys::kInPages>(forward, params, stream);
}

template <class Row>
void launch_kvcache_sm90(const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream) {
  prefill(plan, tensors, memory, stream, attend_to_pages<Row>);
}

}  // namespace flashtile
