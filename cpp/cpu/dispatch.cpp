#include "dispatch.h"

#include <atomic>
#include <cmath>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashtile::cpu {

// kernels.cpp defines these, compiled once for each instruction set.
const Kernels& baseline_kernels(DType dtype);
#if defined(__x86_64__)
const Kernels& avx2_kernels(DType dtype);
const Kernels& avx512_kernels(DType dtype);
const Kernels& avx512_bf16_kernels(DType dtype);
#if defined(FLASHTILE_AMX_KERNELS)
const Kernels& FLASHTILE_AMX_KERNELS(DType dtype);
#endif
#endif

namespace {

/// Returns whether this process may use AMX's tiles and their dot products of bfloat16. Linux gives the state of tiles
/// only to processes that ask.
bool may_use_amx() {
#if defined(FLASHTILE_EMULATE_AMX)
  return true;
#elif defined(FLASHTILE_AMX_KERNELS) && defined(__linux__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // in edx of leaf 7
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kBf16) == 0 || (edx & kTile) == 0) return false;
  // Something has found AVX-512 before, so that there is XCR0. Its bits 17 and 18 are the system's consent.
  constexpr unsigned kTileState = 1u << 17 | 1u << 18;
  __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  if ((eax & kTileState) != kTileState) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

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
  if (!__builtin_cpu_supports("avx512bf16")) return sets;
  sets.push_back(InstructionSet::kAvx512Bf16);
  if (may_use_amx()) sets.push_back(InstructionSet::kAmxBf16);
#endif
  return sets;
}

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> set{instruction_sets().back()};
  return set;
}

/// Returns whether scores differ by less than 2^-38 if all products of Q·K below float32's normal range, 2^-126, count
/// as 0, which is how the instructions for dot products of bfloat16 take them. There are up to 2^8 of them in a score.
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
    case InstructionSet::kAmxBf16: return "amx_bf16";
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
  const DType dtype = problem.fp8 ? DType::kE4M3 : problem.dtype;  // e4m3 numbers come as float32, see Problem
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kBaseline: break;
    case InstructionSet::kAvx2: return avx2_kernels(dtype);
    case InstructionSet::kAvx512: return avx512_kernels(dtype);
    case InstructionSet::kAvx512Bf16:
      return tiny_products_are_nothing(problem) ? avx512_bf16_kernels(dtype) : avx512_kernels(dtype);
    case InstructionSet::kAmxBf16:
#if defined(FLASHTILE_AMX_KERNELS)
      return tiny_products_are_nothing(problem) ? FLASHTILE_AMX_KERNELS(dtype) : avx512_kernels(dtype);
#else
      break;  // never detected
#endif
  }
#endif
  return baseline_kernels(dtype);
}

}  // namespace flashtile::cpu
