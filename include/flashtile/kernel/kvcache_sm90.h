// Many queries over a cache take Hopper's forward kernel, whose producer looks up where each page lies: where there is
// a table, few tiles, or numbers of 8 bits, which are widened there. A cache without a table is one of a page for each
// sequence then. With many tiles such a cache has rows, as ragged sequences have; a kernel of these rows here asks a
// column mask of the last keys, and without one the row of forward.def serves.
#pragma once

#include "flashtile/kernel/paged_sm90.h"

namespace flashtile {

/// Attends to rows under a column mask of the last keys.
template <class Row>
void attend_to_rows(const KvcachePlan& plan, const KvcacheTensors& cached, const ForwardTensors& tensors, void* memory,
                    Stream stream) {
  constexpr Keys kKeys = Keys::kLastMasked;
  using Mainloop = ForwardMainloopSm90<Row::kVariant, kKeys>;
  const ForwardParamsSm90 params = forward_params_sm90<Mainloop>(*plan.prefill, keys_in_rows(plan, tensors), memory);
  launch_forward_sm90<Row, kKeys>(*plan.prefill, LastMasked<ForwardParamsSm90>{params, plan.cache.masked(cached)},
                                  stream);
}

template <class Row, Keys kKeys>
void attend_to_pages(const KvcachePlan& plan, const KvcacheTensors& cached, const ForwardTensors& tensors, void* memory,
                     Stream stream) {
  using Mainloop = ForwardMainloopSm90<Row::kVariant, kKeys>;
  const ForwardPlan& forward = *plan.prefill;
  const PagedForwardParamsSm90 params = paged_params_sm90<Mainloop>(Row::kVariant, plan, cached, tensors, memory);
  if constexpr (Mainloop::kWidens) {
    const WidenedForwardParamsSm90 widened{params, CacheDescales::of(cached.k_descale),
                                           CacheDescales::of(cached.v_descale)};
    launch_forward_sm90<Row, kKeys>(forward, widened, stream);
  } else if (plan.problem.column_masked()) {
    launch_forward_sm90<Row, kKeys | Keys::kLastMasked>(
        forward, LastMasked<PagedForwardParamsSm90>{params, plan.cache.masked(cached)}, stream);
  } else {
    launch_forward_sm90<Row, kKeys>(forward, params, stream);
  }
}

/// A row for caches of 8 bits becomes a kernel for each dtype of queries.
template <class Row, DType kDType>
struct RowOfQueries {
  static constexpr Variant kVariant = as_of_queries(Row::kVariant, kDType);
};

template <class Row>
void launch_kvcache_sm90(const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream) {
  if constexpr (Row::kVariant.fp8()) {
    using Half = RowOfQueries<Row, DType::kFloat16>;
    using BFloat16 = RowOfQueries<Row, DType::kBFloat16>;
    constexpr Keys kKeys = Row::kVariant.dtype == DType::kE4M3 ? Keys::kE4M3InPages : Keys::kE5M2InPages;
    const bool is_half = plan.problem.dtype == DType::kFloat16;
    prefill(plan, tensors, memory, stream, is_half ? attend_to_pages<Half, kKeys> : attend_to_pages<BFloat16, kKeys>);
  } else {
    prefill(plan, tensors, memory, stream, has_rows(plan) ? attend_to_rows<Row> : attend_to_pages<Row, Keys::kInPages>);
  }
}

}  // namespace flashtile
