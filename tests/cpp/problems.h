// This file has the devices and problems for tests of what select decides.
#pragma once

#include "flashtile/flashtile.h"

namespace flashtile {

inline DeviceInfo cpu(int threads = 4) {
  return {.name = "a CPU", .threads = threads};
}

inline DeviceInfo gpu(int compute_capability, int shared_memory_kib) {
  return {.device = {DeviceType::kCuda, 0},
          .name = "a GPU",
          .compute_capability = compute_capability,
          .multiprocessors = 100,
          .max_shared_memory = shared_memory_kib * 1024,
          .l2_bytes = 50 << 20};
}

inline Problem problem_on(const DeviceInfo& device, DType dtype, int head_dim, int head_dim_v, int seqlen) {
  return {.batch = 2,
          .seqlen_q = seqlen,
          .seqlen_k = seqlen,
          .heads_q = 8,
          .heads_k = 2,
          .head_dim = head_dim,
          .head_dim_v = head_dim_v,
          .dtype = dtype,
          .device = device.device,
          .scale = 1};
}

/// These bands lie on one side of the diagonal, or show nothing, as check makes them of a window.
inline constexpr Band kBandsElsewhere[] = {{Band::kUnbounded, -1},
                                           {100, -50},
                                           {-50, 100},
                                           {-200, Band::kUnbounded},
                                           {Band::kUnbounded, -10000},
                                           {-10000, 20000},
                                           {Band::kUnbounded, -Band::kUnbounded}};

/// Returns the same problem of e4m3 numbers.
inline Problem of_fp8(Problem problem) {
  problem.dtype = DType::kE4M3;
  problem.out_dtype = DType::kBFloat16;
  problem.fp8 = true;
  return problem;
}

}  // namespace flashtile
