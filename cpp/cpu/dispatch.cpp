#include "dispatch.h"

#include <atomic>
#include <cmath>
#include <vector>

namespace flashtile::cpu {

// kernels.cpp defines these, compiled once for each instruction set.
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

/// Returns whether scores differ by less than 2^-38 if all products of Q·K below float32's normal range, 2^-126, count
/// as 0, which is how the instruction for dot products of bfloat16 takes them. There are up to 2^8 of them in a score.
bool tiny_products_are_nothing(const Problem& problem) {
  constexpr float kLargestScale = 0x1p80f;
  return std::abs(problem.scale) <= kLargestScale && std::abs(problem.score_map().inner) <= kLargestScale;
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

const Kernels& kernels(const Problem& problem) {
  const DType dtype = problem.dtype;
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kBaseline: break;
    case InstructionSet::kAvx2: return avx2_kernels(dtype);
    case InstructionSet::kAvx512: return avx512_kernels(dtype);
    case InstructionSet::kAvx512Bf16:
      return tiny_products_are_nothing(problem) ? avx512_bf16_kernels(dtype) : avx512_kernels(dtype);
  }
#endif
  return baseline_kernels(dtype);
}

}  // namespace flashtile::cpu
