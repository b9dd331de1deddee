// This file binds forward and backward of attention, dense and ragged.
#include <string>

#include "bindings.h"
#include "call.h"
#include "flashtile/flashtile.h"
#include "options.h"
#include "tensor.h"

namespace flashtile::bindings {
namespace {

using nb::handle;
using namespace nb::literals;

/// Messages call a function by these names.
struct Names {
  const char* forward;
  const char* backward;
};

constexpr Names kDense = {"attention", "attention backward"};
constexpr Names kRagged = {"attention_varlen", "attention_varlen backward"};

const Names& names_of(const nb::tuple& options) {
  const bool ragged = nb::len(options) >= kOptionCount && !option_of(options, kSequences).is_none();
  return ragged ? kRagged : kDense;
}

/// Every call is given these.
struct Given {
  ForwardTensors tensors;
  Options options;
  bool batch_invariant = false;
};

void view_sequences(const char* function, handle sequences, ForwardTensors& tensors) {
  check_count(function, sequences, 4, "tables of sequences");
  const nb::tuple tables = nb::borrow<nb::tuple>(sequences);
  tensors.cu_seqlens_q = tensor_view(function, "cu_seqlens_q", tables[0], kInts);
  tensors.cu_seqlens_k = tensor_view(function, "cu_seqlens_k", tables[1], kInts);
  tensors.seqused_q = optional_view(function, "seqused_q", tables[2], kInts);
  tensors.seqused_k = optional_view(function, "seqused_k", tables[3], kInts);
}

void view_fp8(const char* function, handle fp8, Given& given) {
  check_count(function, fp8, 4, "arguments of e4m3 numbers");
  const nb::tuple parts = nb::borrow<nb::tuple>(fp8);
  given.tensors.q_descale = optional_view(function, "q_descale", parts[0], kFloat32);
  given.tensors.k_descale = optional_view(function, "k_descale", parts[1], kFloat32);
  given.tensors.v_descale = optional_view(function, "v_descale", parts[2], kFloat32);
  given.options.out_dtype = to_out_dtype(function, parts[3]);
}

Given to_given(const char* function, handle q, handle k, handle v, const nb::tuple& options) {
  check_count(function, options, nb::len(options) > kOptionCount ? kPlace + 1 : kOptionCount, "options");
  Given given;
  const handle fp8 = option_of(options, kFp8);
  given.tensors.q = tensor_view(function, "q", q, fp8.is_none() ? kFloats : kE4M3);
  const char* const dtypes = given.tensors.q.dtype == DType::kE4M3 ? kE4M3 : kFloats;
  given.tensors.k = tensor_view(function, "k", k, dtypes);
  given.tensors.v = tensor_view(function, "v", v, dtypes);
  given.tensors.alibi_slopes = optional_view(function, "alibi_slopes", option_of(options, kAlibiSlopes), kFloat32);
  given.tensors.sinks = optional_view(function, "sinks", option_of(options, kSinks));
  given.tensors.mask = optional_view(function, "mask", option_of(options, kMask), kInts);
  given.tensors.max_logits = optional_view(function, "max_logits", option_of(options, kMaxLogits), kFloat32);
  const handle sequences = option_of(options, kSequences);
  if (!sequences.is_none()) view_sequences(function, sequences, given.tensors);
  const AttentionOptions read = to_options(function, options);
  given.options = read.core;
  given.batch_invariant = read.batch_invariant.value_or(false);
  to_place(function, options, given.options);
  if (!fp8.is_none()) view_fp8(function, fp8, given);
  return given;
}

/// Returns a tensor for what a backward needs of each row, see FinishedRow.
nb::object new_state(handle q, const Problem& p) {
  const nb::object new_empty = q.attr(interned().new_empty);
  if (p.ragged) return new_empty(2, p.heads_q, p.seqlen_q, "dtype"_a = interned().float32);
  return new_empty(2, p.batch, p.heads_q, p.seqlen_q, "dtype"_a = interned().float32);
}

/// Returns the same in memory that is no tensor, at half the price, or a tensor where the framework has no such memory.
nb::object new_hidden_state(handle q, const Problem& p) {
  const nb::object memory = p.ragged ? hidden_memory(q, p.device, {2, p.heads_q, p.seqlen_q})
                                     : hidden_memory(q, p.device, {2, p.batch, p.heads_q, p.seqlen_q});
  return memory.is_none() ? new_state(q, p) : memory;
}

nb::object nothing(handle, const Problem&) {
  return nb::none();
}

struct Results {
  nb::object out, lse, state;
};
using MakeRows = nb::object (*)(handle q, const Problem&);

/// Returns the backward's plan as text, or why there is none: a GPU may be unable to count its tiles though it can
/// count the forward's.
std::string backward_string(const Problem& p, const DeviceInfo& device, bool batch_invariant) try {
  return to_string(select_backward(p, device, batch_invariant));
} catch (const Unsupported& error) {
  return std::string("flashtile backward plan\n  none      ") + error.what() + "\n";
}

/// Returns where the keys of each sequence end: see as_cache.
nb::object new_keys_end(handle q, const nb::tuple& options, const Problem& p) {
  if (!p.ragged) return q.attr(interned().new_full)(nb::make_tuple(p.batch), p.seqlen_k, "dtype"_a = interned().int32);
  const nb::tuple tables = nb::borrow<nb::tuple>(option_of(options, kSequences));
  const nb::object begins = tables[1], used = tables[3];
  const nb::object ends = begins.attr("narrow")(0, 1, p.batch);
  if (used.is_none()) return ends;
  const nb::object first = begins.attr("narrow")(0, 0, p.batch);
  return first.attr("add")(used.attr("clamp")(0)).attr("minimum")(ends);  // what breaks the rules becomes what does not
}

/// Computes a batch-invariant forward on a GPU without a kernel for it; its arguments are checked. The state that a
/// backward wants is lse.
Results forward_as_cache(handle q, const nb::tuple& options, const Given& given, handle out, const Problem& p,
                         const DeviceInfo& device, bool with_lse) {
  const char* const function = names_of(options).forward;
  const nb::object keys_end = new_keys_end(q, options, p);
  KvcacheTensors tensors = as_cache(given.tensors, tensor_view(function, "k", keys_end, kInts));
  const KvcacheOptions as_asked{.attention = given.options, .batch_invariant = true};
  const KvcachePlan plan = plan_kvcache(function, tensors, as_asked, device);
  if (explaining()) throw Explained{to_string(plan) + "\n" + backward_string(p, device, true)};
  Results results;
  results.out = given.tensors.out.given() ? nb::borrow(out) : new_out(q, tensors.q, p);
  results.lse = results.state = with_lse ? new_lse(q, p) : nb::none();
  tensors.out = tensor_view(function, "out", results.out);
  tensors.lse = optional_view(function, "lse", results.lse);
  const Stream stream = current_stream(q, p.device);
  const Workspace workspace(function, plan, q);
  const nb::gil_scoped_release no_gil;
  run_kvcache(plan, tensors, workspace.get(), stream);
  return results;
}

/// Computes a forward, whose results go to `out` if that is not None. It allocates nothing before every argument has
/// been checked. With `stands_for_fp8` they are float32 numbers that stand for e4m3 ones.
Results forward(handle q, handle k, handle v, const nb::tuple& options, handle out, MakeRows make_lse,
                MakeRows make_state, bool stands_for_fp8 = false) {
  const char* const function = names_of(options).forward;
  Given given = to_given(function, q, k, v, options);
  given.options.fp8 = stands_for_fp8;
  ForwardTensors& tensors = given.tensors;
  tensors.out = given_out(function, out);
  const DeviceInfo device = device_for(function, tensors.q.device);
  const ForwardPlan plan = plan_forward(function, tensors, given.options, device, given.batch_invariant);
  const Problem& p = plan.problem;
  if (given.batch_invariant) {
    const bool over_cache = p.device.type == DeviceType::kCuda && !has_invariant_kernel(p, device);
    check_invariant(function, tensors, given.options, p, over_cache);
    if (over_cache)
      return forward_as_cache(q, options, given, out, p, device, make_lse != nothing || make_state != nothing);
  }
  if (explaining())
    throw Explained{to_string(plan) + (p.fp8 ? "" : "\n" + backward_string(p, device, given.batch_invariant))};
  if (p.fp8 && make_state != nothing)
    throw Unsupported(std::string(function) + ": q has dtype float8_e4m3fn, expected one with gradients");
  Results results;
  results.out = tensors.out.given() ? nb::borrow(out) : new_out(q, tensors.q, p);
  if (given.batch_invariant && p.device.type == DeviceType::kCuda) {  // as over a cache, the state is lse
    results.lse = results.state = make_lse != nothing || make_state != nothing ? new_lse(q, p) : nb::none();
  } else {
    results.lse = make_lse(q, p);
    results.state = make_state(q, p);
    tensors.state = optional_view(function, "state", results.state);
  }
  tensors.out = tensor_view(function, "out", results.out);
  tensors.lse = optional_view(function, "lse", results.lse);
  const Stream stream = current_stream(q, p.device);
  const Workspace workspace(function, plan, q);
  const nb::gil_scoped_release no_gil;
  run_forward(plan, tensors, workspace.get(), stream);
  return results;
}

/// This is `forward` of an autograd function: it returns out, and saves in `ctx` what backward needs. In C++ this takes
/// half a µs less than in Python.
nb::object saving_forward(handle ctx, handle q, handle k, handle v, const nb::tuple& options, handle sinks) {
  const Results results = forward(q, k, v, options, nb::none(), nothing, new_hidden_state);
  ctx.attr(interned().unsaved) = nb::make_tuple(results.state, options);
  const handle alibi_slopes = option_of(options, kAlibiSlopes);
  const handle sequences = option_of(options, kSequences);
  const handle mask = option_of(options, kMask);
  if (!sequences.is_none())
    ctx.attr(interned().save_for_backward)(q, k, v, alibi_slopes, results.out, sinks, mask,
                                           *nb::borrow<nb::tuple>(sequences));
  else if (!mask.is_none())
    ctx.attr(interned().save_for_backward)(q, k, v, alibi_slopes, results.out, sinks, mask);
  else if (sinks.is_none())
    ctx.attr(interned().save_for_backward)(q, k, v, alibi_slopes, results.out);
  else
    ctx.attr(interned().save_for_backward)(q, k, v, alibi_slopes, results.out, sinks);
  return results.out;
}

void backward(handle dout, handle dlse, handle q, handle k, handle v, handle out, handle rows, handle dq, handle dk,
              handle dv, handle dsinks, const nb::tuple& options) {
  const char* const function = names_of(options).backward;
  const Given given = to_given(function, q, k, v, options);
  BackwardTensors tensors = {
      .forward = given.tensors,
      .dout = tensor_view(function, "dout", dout),
      .dlse = optional_view(function, "dlse", dlse),
      .dq = optional_view(function, "dq", dq),
      .dk = optional_view(function, "dk", dk),
      .dv = optional_view(function, "dv", dv),
      .dsinks = optional_view(function, "dsinks", dsinks),
  };
  tensors.forward.out = tensor_view(function, "out", out);
  const TensorView view_of_rows = tensor_view(function, "lse", rows);
  const bool is_lse = view_of_rows.rank < tensors.forward.q.rank;  // a state has one dimension more than an lse
  (is_lse ? tensors.forward.lse : tensors.forward.state) = view_of_rows;
  const Device device = tensors.forward.q.device;
  const BackwardPlan plan =
      plan_backward(function, tensors, given.options, device_for(function, device), given.batch_invariant);
  const Stream stream = current_stream(q, device);
  const Workspace workspace(function, plan, q);
  const nb::gil_scoped_release no_gil;
  run_backward(plan, tensors, workspace.get(), stream);
}

}  // namespace

void bind_attention(nb::module_& module) {
  // Every argument, even None, goes to the conversions of tensor.h and options.h, because their messages name the
  // argument.
  const auto any = [](const char* name) { return nb::arg(name).none(); };
  const auto bind_forward = [&](const char* name, auto function) {
    module.def(name, function, any("q"), any("k"), any("v"), nb::arg("options"));
  };
  const auto bind_into = [&](const char* name, auto function) {
    module.def(name, function, any("q"), any("k"), any("v"), nb::arg("options"), nb::arg("out") = nb::none());
  };
  bind_into("forward", [](handle q, handle k, handle v, const nb::tuple& options, handle out) {
    return forward(q, k, v, options, out, nothing, nothing).out;
  });
  bind_into("forward_with_lse", [](handle q, handle k, handle v, const nb::tuple& options, handle out) {
    const Results results = forward(q, k, v, options, out, new_lse, nothing);
    return nb::make_tuple(results.out, results.lse);
  });
  bind_forward("forward_with_state", [](handle q, handle k, handle v, const nb::tuple& options) {
    const Results results = forward(q, k, v, options, nb::none(), new_lse, new_state);
    return nb::make_tuple(results.out, results.lse, results.state);
  });
  bind_forward("forward_rounding_weights", [](handle q, handle k, handle v, const nb::tuple& options) {
    const Results results = forward(q, k, v, options, nb::none(), new_lse, nothing, true);
    return nb::make_tuple(results.out, results.lse);
  });
  module.def("check_place", &check_place, nb::arg("function"), nb::arg("out"), nb::arg("read"));
  // This is for tests of an older GPU's kernels on a newer one.
  module.def("_limit_compute_capability", &limit_compute_capability, nb::arg("limit"));
  module.def("saving_forward", &saving_forward, nb::arg("ctx"), any("q"), any("k"), any("v"), nb::arg("options"),
             nb::arg("sinks") = nb::none());
  module.def("backward", &backward, any("dout"), any("dlse"), any("q"), any("k"), any("v"), any("out"), any("rows"),
             any("dq"), any("dk"), any("dv"), any("dsinks"), nb::arg("options"));
}

}  // namespace flashtile::bindings
