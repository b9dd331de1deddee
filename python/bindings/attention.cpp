// Forward, backward and explain of dense attention.
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "bindings.h"
#include "flashtile/flashtile.h"
#include "options.h"
#include "tensor.h"

namespace flashtile::bindings {
namespace {

using nb::handle;
using namespace nb::literals;

constexpr const char* kForward = "attention";
constexpr const char* kBackward = "attention backward";
constexpr const char* kExplain = "explain";

/// What select may use: the device as the core knows it, with as many CPU threads as the caller grants.
DeviceInfo device_for(const char* function, Device device, int num_threads) try {
  DeviceInfo info = device_info(device);
  if (device.type == DeviceType::kCpu) info.threads = num_threads;
  return info;
} catch (const Unsupported& error) {
  throw Unsupported(std::string(function) + ": " + error.what());
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

/// Host memory for a CPU plan, 64-byte aligned. CUDA plans need none yet.
std::unique_ptr<void, Free> allocate_workspace(const Plan& plan) {
  if (plan.workspace_bytes == 0) return nullptr;
  if (plan.problem.device.type != DeviceType::kCpu) throw Unsupported("a CUDA plan asks for a workspace");
  constexpr std::size_t kAlignment = 64;
  const std::size_t bytes = (plan.workspace_bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::unique_ptr<void, Free> memory(std::aligned_alloc(kAlignment, bytes));
  if (!memory) throw std::bad_alloc();
  return memory;
}

/// Names and values that every call needs; they live as long as the process.
struct Interned {
  handle new_empty = nb::str("new_empty").release();
  handle float32 = nb::object(nb::module_::import_("torch").attr("float32")).release();
};

const Interned& interned() {
  static const Interned values;
  return values;
}

ForwardTensors input_tensors(const char* function, handle q, handle k, handle v, handle alibi_slopes) {
  return {
      .q = tensor_view(function, "q", q),
      .k = tensor_view(function, "k", k),
      .v = tensor_view(function, "v", v),
      .alibi_slopes = optional_view(function, "alibi_slopes", alibi_slopes),
  };
}

/// (out, lse), or (out, None) without lse. Nothing is allocated before every argument has been checked.
nb::tuple forward(handle q, handle k, handle v, handle alibi_slopes, handle causal, handle window_left,
                  handle window_right, handle scale, handle softcap, bool with_lse, int num_threads) {
  ForwardTensors tensors = input_tensors(kForward, q, k, v, alibi_slopes);
  const Options options = to_options(kForward, causal, window_left, window_right, scale, softcap);
  const ForwardPlan plan =
      plan_forward(kForward, tensors, options, device_for(kForward, tensors.q.device, num_threads));
  const Problem& p = plan.problem;
  // The framework's own allocator: q.new_empty(...).
  const auto new_empty = q.attr(interned().new_empty);
  const nb::object out = new_empty(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v);
  const nb::object lse =
      with_lse ? new_empty(p.batch, p.heads_q, p.seqlen_q, "dtype"_a = interned().float32) : nb::none();
  tensors.out = tensor_view(kForward, "out", out);
  tensors.lse = optional_view(kForward, "lse", lse);
  const Stream stream = current_stream(q, p.device);
  const auto workspace = allocate_workspace(plan);
  {
    const nb::gil_scoped_release no_gil;
    run_forward(plan, tensors, workspace.get(), stream);
  }
  return nb::make_tuple(out, lse);
}

void backward(handle dout, handle dlse, handle q, handle k, handle v, handle out, handle lse, handle alibi_slopes,
              handle dq, handle dk, handle dv, handle causal, handle window_left, handle window_right, handle scale,
              handle softcap, int num_threads) {
  BackwardTensors tensors = {
      .forward = input_tensors(kBackward, q, k, v, alibi_slopes),
      .dout = tensor_view(kBackward, "dout", dout),
      .dlse = optional_view(kBackward, "dlse", dlse),
      .dq = optional_view(kBackward, "dq", dq),
      .dk = optional_view(kBackward, "dk", dk),
      .dv = optional_view(kBackward, "dv", dv),
  };
  tensors.forward.out = tensor_view(kBackward, "out", out);
  tensors.forward.lse = tensor_view(kBackward, "lse", lse);
  const Options options = to_options(kBackward, causal, window_left, window_right, scale, softcap);
  const Device device = tensors.forward.q.device;
  const BackwardPlan plan = plan_backward(kBackward, tensors, options, device_for(kBackward, device, num_threads));
  const Stream stream = current_stream(q, device);
  const auto workspace = allocate_workspace(plan);
  const nb::gil_scoped_release no_gil;
  run_backward(plan, tensors, workspace.get(), stream);
}

nb::str explain(handle q, handle k, handle v, handle alibi_slopes, handle causal, handle window_left,
                handle window_right, handle scale, handle softcap, int num_threads) {
  const ForwardTensors tensors = input_tensors(kExplain, q, k, v, alibi_slopes);
  const Options options = to_options(kExplain, causal, window_left, window_right, scale, softcap);
  const ForwardPlan plan =
      plan_forward(kExplain, tensors, options, device_for(kExplain, tensors.q.device, num_threads));
  return nb::str(to_string(plan).c_str());
}

}  // namespace

void bind_attention(nb::module_& module) {
  // Every object goes to the conversions of tensor.h and options.h, None too: their messages name the argument.
  const auto any = [](const char* name) { return nb::arg(name).none(); };
  const auto num_threads = nb::arg("num_threads");
  module.def("forward", &forward, any("q"), any("k"), any("v"), any("alibi_slopes"), any("causal"), any("window_left"),
             any("window_right"), any("scale"), any("softcap"), nb::arg("with_lse"), num_threads);
  module.def("backward", &backward, any("dout"), any("dlse"), any("q"), any("k"), any("v"), any("out"), any("lse"),
             any("alibi_slopes"), any("dq"), any("dk"), any("dv"), any("causal"), any("window_left"),
             any("window_right"), any("scale"), any("softcap"), num_threads);
  module.def("explain", &explain, any("q"), any("k"), any("v"), any("alibi_slopes"), any("causal"), any("window_left"),
             any("window_right"), any("scale"), any("softcap"), num_threads);
}

}  // namespace flashtile::bindings
