#include "flashtile/prefill.h"

#include "flashtile/append.h"
#include "flashtile/cuda/launch.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256;

struct LayOutParams {
  CachedRows rows;
  int seqlen_q;
  int* begins_q;
  int* begins_k;
  int* used_k;
  // In a mixed batch sequences of no more queries than these are another kernel's (see KvcachePlan::few): here they
  // have neither queries nor keys. Else used_q is null.
  Spans queries;
  int most_queries;
  int* used_q;
};

__global__ void __launch_bounds__(kThreads) lay_out(const __grid_constant__ LayOutParams params) {
  let_next_kernel_start();  // the forward kernel, which waits for these tables
  for (int b = threadIdx.x; b <= params.rows.batch; b += kThreads) {
    params.begins_q[b] = b * params.seqlen_q;
    params.begins_k[b] = b * params.rows.capacity;
    if (b == params.rows.batch) continue;
    const int queries = params.used_q == nullptr ? 0 : params.queries.at(b).used;
    const bool counts = params.used_q == nullptr || queries > params.most_queries;
    params.used_k[b] = counts ? params.rows.at(b).count() : 0;
    if (params.used_q != nullptr) params.used_q[b] = counts ? queries : 0;
  }
}

struct SplitParams {
  const float* from;  // (H, B · S)
  float* to;          // (B, H, S)
  int heads;
  int seqlen;
  int batch;
};

/// Copies each sequence's rows out of those of all sequences, which are concatenated within each head.
__global__ void __launch_bounds__(kThreads) split_rows(const __grid_constant__ SplitParams params) {
  const int b = blockIdx.x / params.heads, head = blockIdx.x % params.heads;
  const float* const from = params.from + (std::int64_t(head) * params.batch + b) * params.seqlen;
  float* const to = params.to + std::int64_t(blockIdx.x) * params.seqlen;
  for (int i = threadIdx.x; i < params.seqlen; i += kThreads) to[i] = from[i];
}

/// Returns (B, S, H, D), whose entries are whole rows apart, as (1, rows, H, D), with what lies between them.
TensorView in_line(TensorView view) {
  const int rows = rows_to_next(view);
  view.strides[1] = view.shape[1] > 1 ? view.strides[1] : view.strides[0];
  view.shape[1] = view.shape[0] > 0 ? (view.shape[0] - 1) * rows + view.shape[1] : 0;
  view.shape[0] = 1;
  view.strides[0] = 0;
  return view;
}

void attend_in_line(const KvcachePlan& plan, const KvcacheTensors&, const ForwardTensors& tensors, void* memory,
                    Stream stream) {
  plan.prefill->run(*plan.prefill, keys_in_rows(plan, tensors), memory, stream);
}

}  // namespace

void prefill(const KvcachePlan& plan, const KvcacheTensors& t, void* memory, Stream stream, PrefillKernel attend) {
  append(plan, t, memory, stream);

  const Problem& p = plan.problem;
  const PrefillWorkspace workspace = PrefillWorkspace::of(plan.prefill_at, p, *plan.prefill);
  const auto at = [&](std::int64_t place) { return static_cast<char*>(memory) + place; };
  const auto table = [&](std::int64_t place) {
    TensorView view;
    view.data = at(place);
    view.rank = 1;
    return view;
  };
  const bool ragged = plan.prefill->problem.ragged;
  ForwardTensors forward{.q = t.q,
                         .k = in_line(t.k_cache),
                         .v = in_line(t.v_cache),
                         .alibi_slopes = t.alibi_slopes,
                         .sinks = t.sinks,
                         .out = t.out,
                         .lse = t.lse,
                         .max_logits = t.max_logits,
                         .cu_seqlens_q = {},
                         .cu_seqlens_k = {},
                         .seqused_q = {},
                         .seqused_k = {}};
  if (plan.cache.rotary_dim > 0) {
    const std::int64_t row = std::int64_t{p.heads_q} * p.head_dim;
    forward.q.data = at(plan.rotated_at);
    forward.q.strides = {p.seqlen_q * row, row, p.head_dim, 1};
  }
  if (!ragged) return attend(plan, t, forward, at(workspace.forward), stream);

  forward.q = in_line(forward.q);
  forward.out = in_line(forward.out);
  forward.cu_seqlens_q = p.ragged ? t.cu_seqlens_q : table(workspace.begins_q);
  forward.cu_seqlens_k = table(workspace.begins_k);
  forward.seqused_k = table(workspace.used_k);
  if (plan.few) forward.seqused_q = table(workspace.used_q);
  const bool splits_lse = t.lse.given() && !p.ragged && p.batch > 1;
  if (splits_lse) forward.lse.data = at(workspace.lse);

  static KernelHandles lay_out_handles, split_handles;
  const auto ints = [&](std::int64_t place) { return reinterpret_cast<int*>(at(place)); };
  const LayOutParams lay_out_params{plan.cache.rows(t),
                                    p.seqlen_q,
                                    ints(workspace.begins_q),
                                    ints(workspace.begins_k),
                                    ints(workspace.used_k),
                                    plan.cache.queries(t),
                                    plan.few ? plan.few->most_queries : 0,
                                    plan.few ? ints(workspace.used_q) : nullptr};
  launch(lay_out, lay_out_handles, p.device, {1, kThreads, 0}, lay_out_params, stream);
  attend(plan, t, forward, at(workspace.forward), stream);
  if (splits_lse) {
    const SplitParams split_params{reinterpret_cast<const float*>(at(workspace.lse)), static_cast<float*>(t.lse.data),
                                   p.heads_q, p.seqlen_q, p.batch};
    launch(split_rows, split_handles, p.device, {p.batch * p.heads_q, kThreads, 0}, split_params, stream);
  }
  if (plan.few) plan.few->run(*plan.few, t, memory, stream);
}

KvcacheKernel prefill_kernel() {
  return [](const KvcachePlan& plan, const KvcacheTensors& tensors, void* memory, Stream stream) {
    prefill(plan, tensors, memory, stream, attend_in_line);
  };
}

}  // namespace flashtile
