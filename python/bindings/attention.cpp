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

/// Names and values that every call needs; they live as long as the process.
struct Interned {
  handle new_empty = nb::str("new_empty").release();
  handle float32 = nb::object(nb::module_::import_("torch").attr("float32")).release();
  handle get_num_threads = nb::object(nb::module_::import_("torch").attr("get_num_threads")).release();
};

const Interned& interned() {
  static const Interned values;
  return values;
}

/// What select may use: the device as the core knows it, with as many CPU threads as PyTorch may take.
DeviceInfo device_for(const char* function, Device device) try {
  DeviceInfo info = device_info(device);
  if (device.type == DeviceType::kCpu) info.threads = nb::cast<int>(interned().get_num_threads());
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

ForwardTensors input_tensors(const char* function, handle q, handle k, handle v, handle alibi_slopes) {
  return {
      .q = tensor_view(function, "q", q),
      .k = tensor_view(function, "k", k),
      .v = tensor_view(function, "v", v),
      .alibi_slopes = optional_view(function, "alibi_slopes", alibi_slopes),
  };
}

enum class Lse { kNone, kTensor, kBuffer };

nb::object new_lse(handle q, const Problem& p, Lse kind) {
  if (kind == Lse::kNone) return nb::none();
  if (kind == Lse::kBuffer)
    if (auto buffer = Buffer::allocate(q, p.device, {p.batch, p.heads_q, p.seqlen_q}))
      return nb::cast(std::move(*buffer));
  return q.attr(interned().new_empty)(p.batch, p.heads_q, p.seqlen_q, "dtype"_a = interned().float32);
}

TensorView lse_view(const char* function, handle lse) {
  return nb::isinstance<Buffer>(lse) ? nb::cast<const Buffer&>(lse).view() : optional_view(function, "lse", lse);
}

/// (out, lse). Nothing is allocated before every argument has been checked.
nb::tuple forward(handle q, handle k, handle v, handle alibi_slopes, const nb::tuple& options, Lse lse_kind) {
  ForwardTensors tensors = input_tensors(kForward, q, k, v, alibi_slopes);
  const ForwardPlan plan = plan_forward(kForward, tensors, to_options(kForward, options),
                                        device_for(kForward, tensors.q.device));
  const Problem& p = plan.problem;
  const nb::object out = q.attr(interned().new_empty)(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v);
  const nb::object lse = new_lse(q, p, lse_kind);
  tensors.out = tensor_view(kForward, "out", out);
  tensors.lse = lse_view(kForward, lse);
  const Stream stream = current_stream(q, p.device);
  const auto workspace = allocate_workspace(plan);
  {
    const nb::gil_scoped_release no_gil;
    run_forward(plan, tensors, workspace.get(), stream);
  }
  return nb::make_tuple(out, lse);
}

nb::tuple forward_as_asked(handle q, handle k, handle v, handle alibi_slopes, nb::tuple options, bool with_lse) {
  return forward(q, k, v, alibi_slopes, options, with_lse ? Lse::kTensor : Lse::kNone);
}

nb::tuple forward_keeping_lse(handle q, handle k, handle v, handle alibi_slopes, nb::tuple options) {
  return forward(q, k, v, alibi_slopes, options, Lse::kBuffer);
}

void backward(handle dout, handle dlse, handle q, handle k, handle v, handle out, handle lse, handle alibi_slopes,
              handle dq, handle dk, handle dv, nb::tuple options) {
  BackwardTensors tensors = {
      .forward = input_tensors(kBackward, q, k, v, alibi_slopes),
      .dout = tensor_view(kBackward, "dout", dout),
      .dlse = optional_view(kBackward, "dlse", dlse),
      .dq = optional_view(kBackward, "dq", dq),
      .dk = optional_view(kBackward, "dk", dk),
      .dv = optional_view(kBackward, "dv", dv),
  };
  tensors.forward.out = tensor_view(kBackward, "out", out);
  tensors.forward.lse = lse_view(kBackward, lse);
  const Device device = tensors.forward.q.device;
  const BackwardPlan plan =
      plan_backward(kBackward, tensors, to_options(kBackward, options), device_for(kBackward, device));
  const Stream stream = current_stream(q, device);
  const auto workspace = allocate_workspace(plan);
  const nb::gil_scoped_release no_gil;
  run_backward(plan, tensors, workspace.get(), stream);
}

nb::str explain(handle q, handle k, handle v, handle alibi_slopes, nb::tuple options) {
  const ForwardTensors tensors = input_tensors(kExplain, q, k, v, alibi_slopes);
  const ForwardPlan plan = plan_forward(kExplain, tensors, to_options(kExplain, options),
                                        device_for(kExplain, tensors.q.device));
  return nb::str(to_string(plan).c_str());
}

}  // namespace

void bind_attention(nb::module_& module) {
  // Every tensor goes to the conversions of tensor.h, None too: their messages name the argument.
  const auto any = [](const char* name) { return nb::arg(name).none(); };
  const auto options = nb::arg("options");
  module.def("forward", &forward_as_asked, any("q"), any("k"), any("v"), any("alibi_slopes"), options,
             nb::arg("with_lse"));
  module.def("forward_keeping_lse", &forward_keeping_lse, any("q"), any("k"), any("v"), any("alibi_slopes"), options);
  module.def("backward", &backward, any("dout"), any("dlse"), any("q"), any("k"), any("v"), any("out"), any("lse"),
             any("alibi_slopes"), any("dq"), any("dk"), any("dv"), options);
  module.def("explain", &explain, any("q"), any("k"), any("v"), any("alibi_slopes"), options);
}

}  // namespace flashtile::bindings
