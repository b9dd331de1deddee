// These tests check plans of attention over a cache for GPUs: they fit the GPU, every row of the table is reached, and
// what cannot be counted is refused. How keys are divided is in select_kvcache_splits_test.cpp, and what
// Hopper's forward kernel takes in select_prefill_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>

#include "caches.h"
#include "flashtile/flashtile.h"
#include "flashtile/forward_memory.h"
#include "flashtile/prefill.h"
#include "flashtile/registry.h"

namespace flashtile {
namespace {

TEST(SelectKvcache, PlansFitTheGpu) {
  for_each_supported([](const KvcacheProblem& cache, const DeviceInfo& device) {
    const KvcachePlan plan = select_kvcache(cache, device);
    const Problem& p = cache.problem;
    const Variant& v = plan.variant;
    ASSERT_EQ(v.dtype, plan.widened ? p.dtype : cache.stored());
    ASSERT_GE(v.head_dim, p.head_dim);
    ASSERT_GE(v.head_dim_v, p.head_dim_v);
    ASSERT_STRNE(plan.why, "");
    if (plan.prefill) return;  // on Hopper, over a copy
    ASSERT_EQ(plan.shared_memory, kvcache_shared_memory(v));
    ASSERT_LE(plan.shared_memory, device.max_shared_memory);
    ASSERT_GE(plan.teams, 1);
    ASSERT_EQ(plan.grid, cache.queries() == 0 ? 0 : plan.teams * p.heads_k);
    ASSERT_LE(plan.grid, std::max(p.heads_k, device.multiprocessors * blocks_of_multiprocessor(plan, device)));
  });
}

TEST(SelectKvcache, EveryRowIsReached) {
  std::set<std::string> reached;
  for_each_supported([&](const KvcacheProblem& cache, const DeviceInfo& device) {
    reached.insert(name_of(select_kvcache(cache, device).variant));
  });
  for (const KvcacheRow& row : kvcache_rows())
    EXPECT_TRUE(row.variant.arch != Arch::kSm80 || reached.contains(name_of(row.variant))) << name_of(row.variant);
}

TEST(SelectKvcache, EveryRowOfPagesIsReached) {
  std::set<std::string> reached;
  for (const KvcacheRow& row : kvcache_rows()) {
    if (row.variant.arch != Arch::kSm90) continue;
    for (const int head_dim : {row.variant.head_dim - 8, row.variant.head_dim}) {
      for (const int seqlen_q : {16, 100, 500, 2048}) {
        KvcacheProblem cache = in_pages(decode(kH100, 4, 8, 4, 4096), 64);
        cache.problem.seqlen_q = seqlen_q;
        cache.problem.sinks = row.variant.knows(Features::kSinks);
        cache.problem.max_logits = row.variant.knows(Features::kMaxLogits);
        const bool widens = is_fp8(row.variant.dtype);
        (widens ? cache.narrow : cache.problem.dtype) = row.variant.dtype;
        cache.problem.head_dim = cache.problem.head_dim_v = head_dim;
        const KvcachePlan plan = select_kvcache(cache, kH100);
        if (!plan.prefill || plan.widened) continue;
        EXPECT_EQ(plan.shared_memory, ForwardMemorySm90::of(plan.prefill->variant, widens).bytes);
        EXPECT_LE(plan.shared_memory, kH100.max_shared_memory);
        reached.insert(name_of(plan.variant));
      }
    }
  }
  for (const KvcacheRow& row : kvcache_rows())
    EXPECT_TRUE(row.variant.arch != Arch::kSm90 || reached.contains(name_of(row.variant))) << name_of(row.variant);
}

TEST(SelectKvcache, BoxesLieWithinPages) {
  for (int page_size = 1; page_size <= 512; ++page_size) {
    KvcacheProblem cache = in_pages(decode(kH100, 4, 8, 4, 4096), page_size);
    cache.problem.seqlen_q = 20;  // 80 rows of a KV head
    const KvcachePlan plan = select_kvcache(cache, kH100);
    ASSERT_TRUE(plan.prefill && !plan.widened) << page_size;
    const int rows = rows_of_box(cache, plan.variant);
    EXPECT_EQ(rows > 0, page_size % 8 == 0) << page_size << ", where others are gathered";
    if (rows == 0) continue;
    EXPECT_EQ(page_size % rows, 0);
    EXPECT_EQ(plan.variant.tile_n % rows, 0);
    EXPECT_LE(plan.variant.tile_n / rows, 32);  // each box has a lane
  }
  for (const bool max_logits : {false, true}) {
    KvcacheProblem more = in_pages(decode(kH100, 4, 8, 4, 4096), 64);
    more.problem.seqlen_q = 500;
    more.problem.sinks = true;
    more.problem.max_logits = max_logits;
    for (const int head_dim : {40, 64, 96, 128, 192, 256}) {
      more.problem.head_dim = more.problem.head_dim_v = head_dim;
      const KvcachePlan plan = select_kvcache(more, kH100);
      EXPECT_TRUE(plan.prefill) << head_dim;
      EXPECT_EQ(plan.variant.knows(Features::kMaxLogits), max_logits);
    }
  }
}

TEST(SelectKvcache, RefusesMoreThanIntCounts) {
  const auto refused = [](const KvcacheProblem& cache, const char* expected = "expected fewer than 2^31") {
    try {
      select_kvcache(cache, kH100);
    } catch (const Unsupported& error) {
      return std::string(error.what()).find(expected) != std::string::npos;
    }
    return false;
  };
  constexpr int kLongest = (1 << 30) - 1;
  KvcacheProblem cache = decode(kH100, 1, 1, 1, 0);
  cache.problem.seqlen_q = kLongest;
  EXPECT_FALSE(refused(cache));
  cache.problem.heads_q = 3;
  EXPECT_TRUE(refused(cache));                                   // too many rows
  cache.problem.seqlen_q = std::numeric_limits<int>::max() / 3;  // too many rows only in whole tiles
  EXPECT_TRUE(refused(cache));
  cache = decode(kH100, 1 << 10, 1, 16, kLongest);
  EXPECT_TRUE(refused(cache));  // too many items
  EXPECT_FALSE(refused(decode(kH100, kLongest, 1, 1, 1)));
  EXPECT_TRUE(refused(decode(kH100, kLongest + 1, 1, 1, 1), "1073741824 sequences, expected fewer than 2^30"));
}

TEST(KvcachePlan, PrintsWhatWasDecided) {
  const auto holds = [](const KvcachePlan& plan, std::initializer_list<std::string> parts) {
    const std::string text = to_string(plan);
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nin\n" << text;
    return text;
  };
  KvcacheProblem cache = decode(kH100, 4, 8, 4, 4096);
  const KvcachePlan even = select_kvcache(cache, kH100);
  holds(even, {name_of(even.variant), even.why, std::to_string(even.grid), "contiguous, 4096 rows", "one of 4 heads",
               "to " + std::to_string(even.teams) + " thread blocks"});
  cache.num_splits = 3;
  holds(select_kvcache(cache, kH100), {"splits    3 of", "at the same time"});
  cache.num_splits = 0;
  cache.batch_invariant = true;
  holds(select_kvcache(cache, kA100), {"splits    of 1024 keys each"});

  KvcacheProblem prompts = in_pages(decode(kH100, 4, 8, 4, 4096), 64);
  prompts.problem.seqlen_q = 2048;
  const KvcachePlan prefill = select_kvcache(prompts, kH100);
  ASSERT_TRUE(prefill.prefill);
  EXPECT_EQ(holds(prefill, {"64 of 256 pages of 64 rows", name_of(prefill.variant)}).find("splits"), std::string::npos);
}

}  // namespace
}  // namespace flashtile
