// This file has the GPUs and problems for tests of plans of attention over a cache.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <random>
#include <string>

#include "flashtile/flashtile.h"

namespace flashtile {

inline DeviceInfo gpu(int compute_capability, int multiprocessors, int max_shared_memory) {
  return {.device = {DeviceType::kCuda, 0},
          .name = "a GPU",
          .compute_capability = compute_capability,
          .multiprocessors = multiprocessors,
          .max_shared_memory = max_shared_memory,
          .l2_bytes = 50 << 20};
}

inline const DeviceInfo kH100 = gpu(90, 132, 232448), kA100 = gpu(80, 108, 166912), kSmall = gpu(86, 82, 101376);

inline KvcacheProblem decode(const DeviceInfo& device, int batch, int heads_k, int group, int capacity) {
  return {.problem = {.batch = batch,
                      .seqlen_q = 1,
                      .seqlen_k = capacity,
                      .heads_q = heads_k * group,
                      .heads_k = heads_k,
                      .head_dim = 128,
                      .head_dim_v = 128,
                      .dtype = DType::kBFloat16,
                      .device = device.device,
                      .band = Band::causal(),
                      .scale = 1},
          .pages = batch,
          .page_size = capacity};
}

/// Returns the same rows in pages, which a table assigns to sequences.
inline KvcacheProblem in_pages(KvcacheProblem cache, int page_size) {
  cache.of_sequence = (cache.problem.seqlen_k + page_size - 1) / page_size;
  cache.page_size = page_size;
  cache.pages = cache.problem.batch * cache.of_sequence;
  cache.problem.seqlen_k = cache.of_sequence * page_size;
  cache.q_in_line = cache.in_line = cache.has_table = true;
  return cache;
}

/// Calls `visit(problem, device)` for many problems that are documented as supported.
template <class Visit>
void for_each_supported(Visit&& visit) {
  std::mt19937 random(1);
  const auto pick = [&](std::initializer_list<int> of) { return of.begin()[random() % of.size()]; };
  for (const DeviceInfo& device : {kH100, kA100, kSmall}) {
    for (int run = 0; run < 2000; ++run) {
      KvcacheProblem cache = decode(device, pick({0, 1, 2, 3, 7, 64}), pick({1, 2, 3, 8, 64, 300}),
                                    pick({1, 3, 4, 8, 16}), pick({0, 1, 63, 64, 1000, 4096, 40000, 1 << 20}));
      Problem& p = cache.problem;
      p.head_dim = pick({8, 64, 72, 128, 136, 192, 256});
      p.head_dim_v = pick({8, 64, 128, 256});
      p.dtype = pick({0, 1}) == 0 ? DType::kFloat16 : DType::kBFloat16;
      p.seqlen_q = pick({0, 1, 1, 1, 2, 5, 17, 64, 1000});
      p.ragged = pick({0, 1}) == 0;
      if (!p.ragged && p.batch == 0) p.seqlen_q = 1;
      if (pick({0, 1}) == 0) cache.narrow = pick({0, 1}) == 0 ? DType::kE4M3 : DType::kE5M2;
      if (pick({0, 1}) == 0) cache.rotary_dim = p.head_dim / 16 * 16;
      const int splits = pick({0, 1, 2, 3, 4});
      if (splits == 1) cache.batch_invariant = true;
      if (splits == 2) cache.num_splits = std::min(pick({1, 2, 3, 7, 100, 100000}), std::max(p.seqlen_k, 1));
      SCOPED_TRACE("run " + std::to_string(run) + " on " + std::to_string(device.compute_capability) + ": " +
                   to_string(p) + ", stored as " + name_of(cache.stored()) + ", rotary_dim=" +
                   std::to_string(cache.rotary_dim) + " num_splits=" + std::to_string(cache.num_splits) +
                   " batch_invariant=" + std::to_string(cache.batch_invariant));
      visit(cache, device);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

/// Returns how many thread blocks run at a time on a multiprocessor: each takes 1 KiB more of its shared memory than it
/// asks for.
inline int blocks_of_multiprocessor(const KvcachePlan& plan, const DeviceInfo& device) {
  return (device.max_shared_memory + 1024) / (plan.shared_memory + 1024);
}

}  // namespace flashtile
