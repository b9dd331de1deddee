// This file checks batch-invariant forwards, and makes one on a GPU a call over a cache.
#include "flashtile/flashtile.h"
#include "message.h"

namespace flashtile {

void check_invariant(const char* function, const ForwardTensors& tensors, const Options& options, const Problem& p,
                     bool over_cache) {
  const auto refuse_with = [&](const char* name, const std::string& found, const char* expected) {
    refuse<Unsupported>(function, name, found + " with batch_invariant", expected);
  };
  if (p.dropout.active())
    refuse_with("dropout_p", "is " + number_string(options.dropout_p),
                "0, as what is dropped depends on the place in the batch");
  if (p.device.type == DeviceType::kCpu) return;
  if (p.fp8) refuse_with("q", std::string("has dtype ") + name_of(p.dtype), "float16 or bfloat16");
  if (!over_cache) return;
  if (tensors.seqused_q.given())
    refuse_with("seqused_q", "is given",
                "none with sinks and an lse on a GPU; nearest supported: a q of the rows that count, by cu_seqlens_q");
  if (p.ragged && p.column_masked())
    refuse_with("mask", "is given", "none of a ragged batch on a GPU; nearest supported: attention of a dense batch");
}

/// All sequences of a ragged batch share the only entry of the cache, which is all of k and v: what comes before a
/// sequence's keys is its left padding.
KvcacheTensors as_cache(const ForwardTensors& t, const TensorView& keys_end) {
  KvcacheTensors cache;
  cache.q = t.q;
  cache.k_cache = t.k;
  cache.v_cache = t.v;
  cache.cache_seqlens = keys_end;
  cache.alibi_slopes = t.alibi_slopes;
  cache.sinks = t.sinks;
  cache.mask = t.mask;
  cache.max_logits = t.max_logits;
  if (!t.cu_seqlens_k.given()) return cache;
  cache.cu_seqlens_q = t.cu_seqlens_q;
  cache.k_cache = t.k.with_batch();
  cache.v_cache = t.v.with_batch();
  cache.leftpad = t.cu_seqlens_k;
  --cache.leftpad.shape[0];
  cache.cache_batch_idx = cache.leftpad;  // any numbers: Pages::at takes the entry that there is
  return cache;
}

}  // namespace flashtile
