#include "flashtile/problem.h"

namespace flashtile {

ForwardTensors ForwardTensors::with_batch() const {
  ForwardTensors t = *this;
  for (TensorView* view : {&t.q, &t.k, &t.v, &t.out}) *view = view->with_batch();
  return t;
}

BackwardTensors BackwardTensors::with_batch() const {
  BackwardTensors t = *this;
  t.forward = forward.with_batch();
  for (TensorView* view : {&t.dout, &t.dq, &t.dk, &t.dv}) *view = view->with_batch();
  return t;
}

Sequences Problem::sequences(const ForwardTensors& t) const {
  const auto table = [](const TensorView& view) { return static_cast<const int*>(view.data); };
  return {{batch, seqlen_q, table(t.cu_seqlens_q), table(t.seqused_q)},
          {batch, seqlen_k, table(t.cu_seqlens_k), table(t.seqused_k)}};
}

Problem Problem::dense() const {
  if (!ragged) return *this;
  Problem p = *this;
  p.ragged = false;
  if (batch > 0) p.seqlen_q = (seqlen_q + batch - 1) / batch, p.seqlen_k = (seqlen_k + batch - 1) / batch;
  return p;
}

}  // namespace flashtile
