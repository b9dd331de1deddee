// This file makes the parameters of Hopper's forward kernel over the pages of a cache.
#pragma once

#include "flashtile/kernel/forward_sm90.h"
#include "flashtile/mainloop/forward_sm90/pages_producer.h"
#include "flashtile/prefill.h"

namespace flashtile {

template <class Mainloop>
PagedForwardParamsSm90 paged_params_sm90(const Variant& variant, const KvcachePlan& plan, const KvcacheTensors& cached,
                                         const ForwardTensors& tensors, void* memory) {
  const int rows = rows_of_box(plan.cache, variant);
  const int rows_of_map = rows > 0 ? rows : Mainloop::kN;  // whoever gathers rows leaves TMA's maps alone
  return {forward_params_sm90<Mainloop>(*plan.prefill, tensors, memory, rows_of_map),
          plan.cache.layout(cached),
          plan.cache.rows(cached),
          rows,
          rows_to_next(cached.k_cache),
          rows_to_next(cached.v_cache)};
}

}  // namespace flashtile
