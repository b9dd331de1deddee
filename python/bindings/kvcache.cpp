// This file binds attention over a cache of keys and values.
#include "flashtile/kvcache.h"
#include "flashtile/error.h"

#include "bindings.h"
#include "call.h"
#include "options.h"
#include "tensor.h"

namespace flashtile::bindings {
namespace {

using nb::handle;

constexpr const char* kFunction = "attention_kvcache";

/// These are the tensors' indices in the tuple; all but kCacheSeqlens may be None.
enum Tensor : std::size_t {
  kKNew,
  kVNew,
  kRotaryCos,
  kRotarySin,
  kCacheSeqlens,
  kBlockTable,
  kCacheBatchIdx,
  kLeftpad,
  kCuSeqlensQ,
  kKDescale,
  kVDescale,
  kTensorCount
};

KvcacheTensors to_tensors(handle q, handle k_cache, handle v_cache, const nb::tuple& given, const nb::tuple& options) {
  const auto at = [&](Tensor place) { return handle(PyTuple_GetItem(given.ptr(), static_cast<Py_ssize_t>(place))); };
  const auto optional = [&](const char* name, Tensor place, const char* dtypes) {
    return optional_view(kFunction, name, at(place), dtypes);
  };
  return {
      .q = tensor_view(kFunction, "q", q),
      .k_cache = tensor_view(kFunction, "k_cache", k_cache),
      .v_cache = tensor_view(kFunction, "v_cache", v_cache),
      .cache_seqlens = tensor_view(kFunction, "cache_seqlens", at(kCacheSeqlens), kInts),
      .max_logits = optional_view(kFunction, "max_logits", option_of(options, kMaxLogitsOfCache), kFloat32),
      .k_new = optional("k_new", kKNew, kFloats),
      .v_new = optional("v_new", kVNew, kFloats),
      .rotary_cos = optional("rotary_cos", kRotaryCos, kFloats),
      .rotary_sin = optional("rotary_sin", kRotarySin, kFloats),
      .block_table = optional("block_table", kBlockTable, kInts),
      .cache_batch_idx = optional("cache_batch_idx", kCacheBatchIdx, kInts),
      .leftpad = optional("leftpad", kLeftpad, kInts),
      .cu_seqlens_q = optional("cu_seqlens_q", kCuSeqlensQ, kInts),
      .alibi_slopes = optional_view(kFunction, "alibi_slopes", option_of(options, kAlibiSlopes), kFloat32),
      .sinks = optional_view(kFunction, "sinks", option_of(options, kSinks)),
      .mask = optional_view(kFunction, "mask", option_of(options, kMask), kInts),
      .k_descale = optional("k_descale", kKDescale, kFloat32),
      .v_descale = optional("v_descale", kVDescale, kFloat32),
  };
}

/// Returns (out, lse), or (out, None). It allocates and writes nothing before every argument has been checked.
nb::tuple kvcache(handle q, handle k_cache, handle v_cache, const nb::tuple& given, const nb::tuple& options,
                  handle out_or_none) {
  check_count(kFunction, given, kTensorCount, "tensors");
  check_count(kFunction, options, kCacheOptionCount, "options");
  KvcacheTensors tensors = to_tensors(q, k_cache, v_cache, given, options);
  tensors.out = given_out(kFunction, out_or_none);
  const KvcachePlan plan =
      plan_kvcache(kFunction, tensors, to_cache_options(kFunction, options), device_for(kFunction, tensors.q.device));
  const bool with_lse = returns_lse(kFunction, options);
  if (explaining()) throw Explained{to_string(plan)};
  const nb::object lse = with_lse ? new_lse(q, plan.problem) : nb::none();
  const nb::object out = tensors.out.given() ? nb::borrow(out_or_none) : new_out(q, tensors.q, plan.problem);
  tensors.out = tensor_view(kFunction, "out", out);
  tensors.lse = optional_view(kFunction, "lse", lse);
  const Stream stream = current_stream(q, plan.problem.device);
  const Workspace workspace(kFunction, plan, q);
  {
    const nb::gil_scoped_release no_gil;
    run_kvcache(plan, tensors, workspace.get(), stream);
  }
  return nb::make_tuple(out, lse);
}

}  // namespace

void bind_kvcache(nb::module_& module) {
  // Every argument, even None, goes to the conversions of tensor.h, because their messages name the argument.
  const auto any = [](const char* name) { return nb::arg(name).none(); };
  module.def("kvcache", &kvcache, any("q"), any("k_cache"), any("v_cache"), nb::arg("tensors"), nb::arg("options"),
             nb::arg("out") = nb::none());
}

}  // namespace flashtile::bindings
