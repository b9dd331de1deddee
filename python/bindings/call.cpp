#include "call.h"

#include <algorithm>
#include <new>
#include <string>

#include "flashtile/error.h"
#include "flashtile/flashtile.h"
#include "tensor.h"

namespace flashtile::bindings {
namespace {

using nb::handle;
using namespace nb::literals;

int compute_capability_limit = 1000;

}  // namespace

const Interned& interned() {
  static const Interned values;
  return values;
}

void check_count(const char* function, handle tuple, std::size_t count, const char* what) {
  if (!PyTuple_Check(tuple.ptr()) || nb::len(tuple) != count)
    throw InvalidType(std::string(function) + ": expected " + std::to_string(count) + " " + what);
}

DeviceInfo known_device(const char* function, Device device) try {
  DeviceInfo info = device_info(device);
  info.compute_capability = std::min(info.compute_capability, compute_capability_limit);
  return info;
} catch (const Unsupported& error) {
  throw Unsupported(std::string(function) + ": " + error.what());
}

DeviceInfo device_for(const char* function, Device device) {
  if (const DeviceInfo* planned = planned_device()) return *planned;
  DeviceInfo info = known_device(function, device);
  if (device.type == DeviceType::kCpu) info.threads = nb::cast<int>(interned().get_num_threads());
  return info;
}

void limit_compute_capability(int limit) {
  compute_capability_limit = limit;
}

TensorView given_out(const char* function, handle out) try {
  return planned_device() ? TensorView{} : optional_view(function, "out", out);
} catch (const Unreadable& refusal) {
  throw Unsupported(refusal.what());
}

/// What kernels cannot read is copied for them, and does not lie in `out` any more when that is written.
void check_place(const char* function, handle out, const nb::dict& read) {
  const TensorView place = given_out(function, out);
  for (const auto& [name, tensor] : read) try {
      const std::string called = nb::str(name).c_str();
      if (to_dtype(nb::getattr(tensor, "dtype", nb::none())) == DType::kOther) continue;
      const TensorView view = tensor_view(function, called.c_str(), tensor);
      if (view.device == place.device) flashtile::check_place(function, place, called.c_str(), view);
    } catch (const Unreadable&) {
    }
}

/// Where out has q's shape, empty_like takes a quarter of a microsecond less than a shape would; a dtype takes as much.
nb::object new_out(handle q, const TensorView& view, const Problem& p) {
  const handle dtype = torch_dtype(p.out_dtype);
  if (p.head_dim_v == p.head_dim && view.contiguous())
    return p.out_dtype == p.dtype ? interned().empty_like(q) : interned().empty_like(q, "dtype"_a = dtype);
  if (p.ragged) return q.attr(interned().new_empty)(p.seqlen_q, p.heads_q, p.head_dim_v, "dtype"_a = dtype);
  return q.attr(interned().new_empty)(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v, "dtype"_a = dtype);
}

nb::object new_lse(handle q, const Problem& p) {
  if (p.ragged) return q.attr(interned().new_empty)(p.heads_q, p.seqlen_q, "dtype"_a = interned().float32);
  return q.attr(interned().new_empty)(p.batch, p.heads_q, p.seqlen_q, "dtype"_a = interned().float32);
}

HostMemory host_memory(std::int64_t bytes) {
  constexpr std::int64_t kAlignment = 64;
  HostMemory memory(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
  if (!memory) throw std::bad_alloc();
  return memory;
}

Workspace::Workspace(const char* function, const Plan& plan, handle like) {
  const std::int64_t bytes = plan.workspace_bytes;
  if (bytes == 0) return;
  if (plan.problem.device.type == DeviceType::kCpu) {
    host_ = host_memory(bytes);
  } else {
    const std::int64_t floats = (bytes + 3) / 4;
    device_ = hidden_memory(like, plan.problem.device, {floats});
    if (device_.is_none()) device_ = like.attr(interned().new_empty)(floats, "dtype"_a = interned().float32);
    pointer_ = tensor_view(function, "workspace", device_).data;
  }
}

}  // namespace flashtile::bindings
