#include "flashtile/merge.h"

#include "cpu/cpu.h"
#include "device.h"
#include "flashtile/math/softmax.h"
#include "operand.h"

namespace flashtile {
namespace {

constexpr const char* kWhere = ", as out";

void check_states(const Operand& state, const TensorView& out, Size rows) {
  state.has_shape({2, out.shape[0], out.shape[2], rows}).has_dtype(DType::kFloat32).is_on(out.device, kWhere);
}

void check_part(const char* function, const MergeCall& call, const PartialResult& part, const std::string& name) {
  const TensorView& whole = call.out;
  if (part.begin < 0 || part.begin > part.end || part.end > whole.shape[1])
    refuse<InvalidArgument>(function, name.c_str(),
                            "has rows [" + std::to_string(part.begin) + ", " + std::to_string(part.end) + ")",
                            "rows of S = " + std::to_string(whole.shape[1]));
  const Size rows = part.end - part.begin;
  const std::string out_name = name + ".out", state_name = name + ".state";
  const Operand out{function, out_name.c_str(), "(B, end - begin, H, D_v)", part.out};
  out.has_shape({whole.shape[0], rows, whole.shape[2], whole.shape[3]});
  check_floating(out);
  out.has_dtype(call.parts[0].out.dtype, ", as parts[0].out")
      .is_on(whole.device, kWhere)
      .has_contiguous_last_dimension<Unreadable>()
      .is_aligned();

  const Operand state{function, state_name.c_str(), "(2, B, H, end - begin)", part.state};
  if (call.state.given()) return check_states(state, whole, rows);
  if (part.state.given()) state.refuse<InvalidType>("is a tensor", "None, as state");
}

void check_merge(const char* function, const MergeCall& call) {
  const Operand out{function, "out", "(B, S, H, D_v)", call.out};
  out.has_rank(4);
  check_floating(out);
  check_sizes(out);
  check_head_dim(out, "D_v");
  out.has_contiguous_last_dimension().is_aligned();
  if (call.state.given()) check_states({function, "state", "(2, B, H, S)", call.state}, call.out, call.out.shape[1]);

  const std::size_t count = call.parts.size();
  if (count < 1 || count > kMostParts)
    refuse<InvalidArgument>(function, "parts", "has " + std::to_string(count), "1 to " + std::to_string(kMostParts));
  for (std::size_t i = 0; i < count; ++i) check_part(function, call, call.parts[i], "parts[" + std::to_string(i) + "]");

  const DType from = call.parts[0].out.dtype;
  if (call.out.dtype != DType::kFloat32 && from != DType::kFloat32) out.has_dtype(from, ", as parts[0].out");
}

}  // namespace

float unit_of_scores(float scale, float softcap, bool alibi) {
  return ScoreMap::of(scale, softcap, alibi).unit;
}

#ifdef FLASHTILE_WITH_CUDA
void launch_merge(const MergeCall& call, Stream stream);  // cpp/cuda/merge.cu
#endif

void merge(const char* function, const MergeCall& call, const DeviceInfo& device, Stream stream) {
  check_merge(function, call);
  if (call.out.empty()) return;
  const Device at = call.out.device;
  if (at.type == DeviceType::kCpu) return cpu::merge(call, device.threads);
#ifdef FLASHTILE_WITH_CUDA
  const DeviceGuard guard(at);
  launch_merge(call, stream);
#else
  static_cast<void>(stream);
  refuse_without_cuda(std::string(function) + " is on " + name_of(at));
#endif
}

}  // namespace flashtile
