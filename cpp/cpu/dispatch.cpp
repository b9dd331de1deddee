#include "dispatch.h"

#include <atomic>
#include <vector>

namespace flashtile::cpu {

// kernels.cpp, compiled for each instruction set.
const Kernels& baseline_kernels(DType dtype);
#if defined(__x86_64__)
const Kernels& avx2_kernels(DType dtype);
const Kernels& avx512_kernels(DType dtype);
const Kernels& avx512_bf16_kernels(DType dtype);
#endif

namespace {

std::vector<InstructionSet> detect() {
  std::vector<InstructionSet> sets{InstructionSet::kBaseline};
#if defined(__x86_64__)
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) {
    return sets;
  }
  sets.push_back(InstructionSet::kAvx2);
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))) {
    return sets;
  }
  sets.push_back(InstructionSet::kAvx512);
  if (__builtin_cpu_supports("avx512bf16")) sets.push_back(InstructionSet::kAvx512Bf16);
#endif
  return sets;
}

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> set{instruction_sets().back()};
  return set;
}

}  // namespace

const char* name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::kBaseline: return "baseline";
    case InstructionSet::kAvx2: return "avx2";
    case InstructionSet::kAvx512: return "avx512";
    case InstructionSet::kAvx512Bf16: return "avx512_bf16";
  }
  return "unknown";
}

std::span<const InstructionSet> instruction_sets() {
  static const std::vector<InstructionSet> sets = detect();
  return sets;
}

InstructionSet instruction_set() {
  return chosen();
}

void use_instruction_set(InstructionSet set) {
  chosen() = set;
}

const Kernels& kernels(DType dtype) {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kBaseline: break;
    case InstructionSet::kAvx2: return avx2_kernels(dtype);
    case InstructionSet::kAvx512: return avx512_kernels(dtype);
    case InstructionSet::kAvx512Bf16: return avx512_bf16_kernels(dtype);
  }
#endif
  return baseline_kernels(dtype);
}

}  // namespace flashtile::cpu
