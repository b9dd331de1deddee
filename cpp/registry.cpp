// This file holds the variant tables as arrays. A row's launcher is the CPU backend's, or, in a build with CUDA, the
// function that the row's code defines (see cpp/variants/variant.cu.in).
#include "flashtile/registry.h"

#include <array>

#include "cpu/cpu.h"
#include "flashtile/prefill.h"

#define FLASHTILE_NAME(arch, dtype, head_dim, head_dim_v, m, n, stages, warps, features) \
  arch##_##dtype##_d##head_dim##_v##head_dim_v##_m##m##_n##n##_s##stages##_w##warps##_##features
#define FLASHTILE_VARIANT(arch, dtype, head_dim, head_dim_v, m, n, stages, warps, features) \
  {table::arch, table::dtype, head_dim, head_dim_v, m, n, stages, warps, table::features}
#define FLASHTILE_JOIN_(a, b) a##b
#define FLASHTILE_JOIN(a, b) FLASHTILE_JOIN_(a, b)
#define FLASHTILE_LAUNCH_FORWARD(...) FLASHTILE_JOIN(launch_forward_, FLASHTILE_NAME(__VA_ARGS__))
#define FLASHTILE_LAUNCH_BACKWARD(...) FLASHTILE_JOIN(launch_backward_, FLASHTILE_NAME(__VA_ARGS__))
#define FLASHTILE_LAUNCH_KVCACHE(...) FLASHTILE_JOIN(launch_kvcache_, FLASHTILE_NAME(__VA_ARGS__))
#define FLASHTILE_LAUNCH_INVARIANT(...) FLASHTILE_JOIN(launch_invariant_, FLASHTILE_NAME(__VA_ARGS__))
#define FLASHTILE_LAUNCH_INVARIANT_KVCACHE(...) FLASHTILE_JOIN(launch_invariant_kvcache_, FLASHTILE_NAME(__VA_ARGS__))

// The first column of a row, its architecture, says what to declare and what to list.
#define FLASHTILE_DECLARE_FORWARD_cpu(...)
#define FLASHTILE_DECLARE_BACKWARD_cpu(...)
#define FLASHTILE_DECLARE_KVCACHE_cpu(...)
#define FLASHTILE_FORWARD_cpu(...) &cpu::run_forward
#define FLASHTILE_BACKWARD_cpu(...) &cpu::run_backward
#define FLASHTILE_KVCACHE_cpu(...) &cpu::run_kvcache
#ifdef FLASHTILE_WITH_CUDA
#define FLASHTILE_DECLARE_FORWARD_sm80(...) \
  void FLASHTILE_LAUNCH_FORWARD(__VA_ARGS__)(const ForwardPlan&, const ForwardTensors&, void* workspace, Stream);
#define FLASHTILE_DECLARE_BACKWARD_sm80(...) \
  void FLASHTILE_LAUNCH_BACKWARD(__VA_ARGS__)(const BackwardPlan&, const BackwardTensors&, void* workspace, Stream);
#define FLASHTILE_DECLARE_KVCACHE_sm80(...) \
  void FLASHTILE_LAUNCH_KVCACHE(__VA_ARGS__)(const KvcachePlan&, const KvcacheTensors&, void* workspace, Stream);
#define FLASHTILE_DECLARE_INVARIANT_sm90(...)                                                                       \
  void FLASHTILE_LAUNCH_INVARIANT(__VA_ARGS__)(const ForwardPlan&, const ForwardTensors&, void* workspace, Stream); \
  void FLASHTILE_LAUNCH_INVARIANT_KVCACHE(__VA_ARGS__)(const KvcachePlan&, const KvcacheTensors&, void* workspace,  \
                                                       Stream);
#define FLASHTILE_INVARIANT_sm90(...) \
  &FLASHTILE_LAUNCH_INVARIANT(__VA_ARGS__), &FLASHTILE_LAUNCH_INVARIANT_KVCACHE(__VA_ARGS__)
#define FLASHTILE_FORWARD_sm80(...) &FLASHTILE_LAUNCH_FORWARD(__VA_ARGS__)
#define FLASHTILE_BACKWARD_sm80(...) &FLASHTILE_LAUNCH_BACKWARD(__VA_ARGS__)
#define FLASHTILE_KVCACHE_sm80(...) &FLASHTILE_LAUNCH_KVCACHE(__VA_ARGS__)
#else
#define FLASHTILE_DECLARE_FORWARD_sm80(...)
#define FLASHTILE_DECLARE_BACKWARD_sm80(...)
#define FLASHTILE_DECLARE_KVCACHE_sm80(...)
#define FLASHTILE_DECLARE_INVARIANT_sm90(...)
#define FLASHTILE_INVARIANT_sm90(...) nullptr, nullptr
#define FLASHTILE_FORWARD_sm80(...) nullptr
#define FLASHTILE_BACKWARD_sm80(...) nullptr
#define FLASHTILE_KVCACHE_sm80(...) nullptr
#endif
#define FLASHTILE_DECLARE_FORWARD_sm90(...) FLASHTILE_DECLARE_FORWARD_sm80(__VA_ARGS__)
#define FLASHTILE_DECLARE_BACKWARD_sm90(...) FLASHTILE_DECLARE_BACKWARD_sm80(__VA_ARGS__)
#define FLASHTILE_DECLARE_KVCACHE_sm90(...) FLASHTILE_DECLARE_KVCACHE_sm80(__VA_ARGS__)
#define FLASHTILE_FORWARD_sm90(...) FLASHTILE_FORWARD_sm80(__VA_ARGS__)
#define FLASHTILE_BACKWARD_sm90(...) FLASHTILE_BACKWARD_sm80(__VA_ARGS__)
#define FLASHTILE_KVCACHE_sm90(...) FLASHTILE_KVCACHE_sm80(__VA_ARGS__)

namespace flashtile {

#define FORWARD(arch, ...) FLASHTILE_DECLARE_FORWARD_##arch(arch, __VA_ARGS__)
#include "variants/forward.def"
#undef FORWARD
#define BACKWARD(arch, ...) FLASHTILE_DECLARE_BACKWARD_##arch(arch, __VA_ARGS__)
#include "variants/backward.def"
#undef BACKWARD
#define KVCACHE(arch, ...) FLASHTILE_DECLARE_KVCACHE_##arch(arch, __VA_ARGS__)
#include "variants/kvcache.def"
#undef KVCACHE
#define INVARIANT(arch, ...) FLASHTILE_DECLARE_INVARIANT_##arch(arch, __VA_ARGS__)
#include "variants/invariant.def"
#undef INVARIANT

namespace {

constexpr auto kForwardRows = std::to_array<ForwardRow>({
#define FORWARD(arch, ...) {FLASHTILE_VARIANT(arch, __VA_ARGS__), FLASHTILE_FORWARD_##arch(arch, __VA_ARGS__)},
#include "variants/forward.def"
#undef FORWARD
});

constexpr auto kBackwardRows = std::to_array<BackwardRow>({
#define BACKWARD(arch, ...) {FLASHTILE_VARIANT(arch, __VA_ARGS__), FLASHTILE_BACKWARD_##arch(arch, __VA_ARGS__)},
#include "variants/backward.def"
#undef BACKWARD
});

constexpr auto kKvcacheRows = std::to_array<KvcacheRow>({
#define KVCACHE(arch, ...) {FLASHTILE_VARIANT(arch, __VA_ARGS__), FLASHTILE_KVCACHE_##arch(arch, __VA_ARGS__)},
#include "variants/kvcache.def"
#undef KVCACHE
});

constexpr auto kInvariantRows = std::to_array<InvariantRow>({
#define INVARIANT(arch, ...) {FLASHTILE_VARIANT(arch, __VA_ARGS__), FLASHTILE_INVARIANT_##arch(arch, __VA_ARGS__)},
#include "variants/invariant.def"
#undef INVARIANT
});

}  // namespace

std::span<const ForwardRow> forward_rows() {
  return kForwardRows;
}

std::span<const BackwardRow> backward_rows() {
  return kBackwardRows;
}

std::span<const KvcacheRow> kvcache_rows() {
  return kKvcacheRows;
}

std::span<const InvariantRow> invariant_rows() {
  return kInvariantRows;
}

#ifndef FLASHTILE_WITH_CUDA
KvcacheKernel prefill_kernel() {
  return nullptr;
}
KvcacheKernel widened_kernel() {
  return nullptr;
}
#endif

}  // namespace flashtile
