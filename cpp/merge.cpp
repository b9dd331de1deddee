#include "flashtile/merge.h"

#include "cpu/cpu.h"
#include "device.h"
#include "operand.h"

namespace flashtile {
namespace {

void check_merge(const char* function, const MergeCall& call) {
  constexpr const char* kSizes = "(B, S, H, D_v)";
  constexpr const char* kStateSizes = "(2, B, H, S)";
  constexpr const char* kWhy = ", as total_out";
  const TensorView& total = call.total.out;
  const Operand total_out{function, "total_out", kSizes, total};
  total_out.has_rank(4).has_dtype(DType::kFloat32);
  check_sizes(total_out);
  check_head_dim(total_out, "D_v");
  total_out.has_contiguous_last_dimension().is_aligned();

  const Operand out{function, "out", kSizes, call.part.out};
  out.has_shape({total.shape[0], total.shape[1], total.shape[2], total.shape[3]});
  check_floating(out);
  out.is_on(total.device, kWhy).has_contiguous_last_dimension<Unreadable>().is_aligned();

  for (const Operand& state : {Operand{function, "total_state", kStateSizes, call.total.state},
                               Operand{function, "state", kStateSizes, call.part.state}})
    state.has_shape({2, total.shape[0], total.shape[2], total.shape[1]})
        .has_dtype(DType::kFloat32)
        .is_on(total.device, kWhy);
}

}  // namespace

#ifdef FLASHTILE_WITH_CUDA
void launch_merge(const MergeCall& call, Stream stream);  // cpp/cuda/merge.cu
#endif

void merge(const char* function, const MergeCall& call, const DeviceInfo& device, Stream stream) {
  check_merge(function, call);
  if (call.total.out.empty()) return;
  const Device at = call.total.out.device;
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
