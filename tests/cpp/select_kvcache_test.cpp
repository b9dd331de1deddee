// These tests check plans of attention over a cache for GPUs: they fit the GPU, and there is room for all that a kernel
// writes, whatever the tables hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "flashtile/flashtile.h"
#include "flashtile/prefill.h"
#include "flashtile/registry.h"
#include "flashtile/scheduler/split_keys.h"
#include "views.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"  // this header is written for nvcc
#include "flashtile/kvcache_params.h"
#pragma GCC diagnostic pop

namespace flashtile {
namespace {

DeviceInfo gpu(int compute_capability, int multiprocessors, int max_shared_memory) {
  return {.device = {DeviceType::kCuda, 0},
          .name = "a GPU",
          .compute_capability = compute_capability,
          .multiprocessors = multiprocessors,
          .max_shared_memory = max_shared_memory,
          .l2_bytes = 50 << 20};
}

const DeviceInfo kH100 = gpu(90, 132, 232448), kA100 = gpu(80, 108, 166912), kSmall = gpu(86, 82, 101376);

KvcacheProblem decode(const DeviceInfo& device, int batch, int heads_k, int group, int capacity) {
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
KvcacheProblem in_pages(KvcacheProblem cache, int page_size) {
  cache.of_sequence = (cache.problem.seqlen_k + page_size - 1) / page_size;
  cache.page_size = page_size;
  cache.pages = cache.problem.batch * cache.of_sequence;
  cache.problem.seqlen_k = cache.of_sequence * page_size;
  cache.in_line = cache.has_table = true;
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
      if (pick({0, 1}) == 0) cache.rotary_dim = p.head_dim / 16 * 16;
      const int splits = pick({0, 1, 2, 3, 4});
      if (splits == 1) cache.batch_invariant = true;
      if (splits == 2) cache.num_splits = std::min(pick({1, 2, 3, 7, 100, 100000}), std::max(p.seqlen_k, 1));
      SCOPED_TRACE("run " + std::to_string(run) + " on " + std::to_string(device.compute_capability) + ": " +
                   to_string(p) + ", rotary_dim=" + std::to_string(cache.rotary_dim) + " num_splits=" +
                   std::to_string(cache.num_splits) + " batch_invariant=" + std::to_string(cache.batch_invariant));
      visit(cache, device);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

/// Returns how many thread blocks run at a time on a multiprocessor: each takes 1 KiB more of its shared memory than it
/// asks for.
int blocks_of_multiprocessor(const KvcachePlan& plan, const DeviceInfo& device) {
  return (device.max_shared_memory + 1024) / (plan.shared_memory + 1024);
}

TEST(SelectKvcache, PlansFitTheGpu) {
  for_each_supported([](const KvcacheProblem& cache, const DeviceInfo& device) {
    const KvcachePlan plan = select_kvcache(cache, device);
    const Problem& p = cache.problem;
    const Variant& v = plan.variant;
    ASSERT_EQ(v.dtype, p.dtype);
    ASSERT_GE(v.head_dim, p.head_dim);
    ASSERT_GE(v.head_dim_v, p.head_dim_v);
    ASSERT_STRNE(plan.why, "");
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
      for (const int seqlen_q : {16, 500, 2048}) {
        KvcacheProblem cache = in_pages(decode(kH100, 4, 8, 4, 4096), 16);
        cache.problem.seqlen_q = seqlen_q;
        cache.problem.dtype = row.variant.dtype;
        cache.problem.head_dim = cache.problem.head_dim_v = head_dim;
        const KvcachePlan plan = select_kvcache(cache, kH100);
        EXPECT_EQ(plan.shared_memory, forward_shared_memory(plan.variant));
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
    cache.problem.seqlen_q = 500;
    const KvcachePlan plan = select_kvcache(cache, kH100);
    EXPECT_EQ(plan.prefill != nullptr, page_size % 16 == 0) << page_size;
    if (!plan.prefill) continue;
    const int rows = rows_of_box(cache, plan.variant);
    EXPECT_EQ(page_size % rows, 0);
    EXPECT_EQ(plan.variant.tile_n % rows, 0);
    EXPECT_LE(plan.variant.tile_n / rows, 32);  // each box has a lane
  }
  KvcacheProblem sinks = in_pages(decode(kH100, 4, 8, 4, 4096), 64);
  sinks.problem.seqlen_q = 500;
  sinks.problem.sinks = true;
  EXPECT_FALSE(select_kvcache(sinks, kH100).prefill);
  sinks.has_table = false;
  EXPECT_TRUE(select_kvcache(sinks, kH100).prefill);
}

TEST(SelectKvcache, ManyRowsGoThroughTheForwardKernelOnHopper) {
  const auto plan = [](const DeviceInfo& device, auto&& change) {
    KvcacheProblem cache = decode(device, 4, 8, 4, 4096);
    cache.problem.seqlen_q = 500;
    cache.in_line = true;
    change(cache);
    return select_kvcache(cache, device);
  };
  const auto nothing = [](KvcacheProblem&) {};
  for (const bool ragged : {false, true}) {
    const KvcachePlan found = plan(kH100, [&](KvcacheProblem& cache) {
      cache.problem.ragged = ragged;
      if (ragged) cache.problem.seqlen_q *= cache.problem.batch;
      cache.rotary_dim = 64;
    });
    ASSERT_TRUE(found.prefill);
    const ForwardPlan& forward = *found.prefill;
    EXPECT_EQ(found.variant, forward.variant);
    EXPECT_EQ(forward.variant.arch, Arch::kSm90);
    EXPECT_TRUE(forward.problem.ragged);
    EXPECT_EQ(forward.problem.seqlen_q, 4 * 500);
    EXPECT_EQ(forward.problem.seqlen_k, 4 * 4096);
    const PrefillWorkspace at = PrefillWorkspace::of(found.prefill_at, found.problem, forward);
    EXPECT_EQ(found.prefill_at, std::int64_t{4} * 500 * 32 * 128 * 2);  // after the rotated q
    EXPECT_GE(at.begins_q, found.prefill_at);
    EXPECT_GE(at.begins_k - at.begins_q, 5 * 4);
    EXPECT_GE(at.used_k - at.begins_k, 5 * 4);
    EXPECT_GE(at.lse - at.used_k, 4 * 4);
    EXPECT_GE(at.forward - at.lse, ragged ? 0 : 4 * 4 * 500 * 32);
    EXPECT_EQ(at.forward % 64, 0);
    EXPECT_GE(found.workspace_bytes, at.forward + forward.workspace_bytes);
  }
  EXPECT_FALSE(plan(kA100, nothing).prefill);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.in_line = false; }).prefill);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.num_splits = 2; }).prefill);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.batch_invariant = true; }).prefill);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.seqlen_q = 7; }).prefill);  // that makes 28 rows
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.batch = 0; }).prefill);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.seqlen_k = 0; }).prefill);
  // With few tiles and many keys, only splits of the keys fill the GPU.
  const KvcachePlan few =
      plan(kH100, [](KvcacheProblem& cache) { cache.problem.batch = 1, cache.problem.seqlen_q = 50; });
  ASSERT_TRUE(few.prefill);
  EXPECT_GT(few.prefill->splits, 1);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.seqlen_k = 1 << 28; }).prefill);
}

TEST(SelectKvcache, FewTilesOverPagesAreADenseBatch) {
  const auto plan = [](int batch, int seqlen_q, bool ragged) {
    KvcacheProblem cache = in_pages(decode(kH100, batch, 8, 4, 4096), 16);
    cache.problem.seqlen_q = seqlen_q;
    cache.problem.ragged = ragged;
    return select_kvcache(cache, kH100);
  };
  const KvcachePlan few = plan(2, 40, false);
  ASSERT_TRUE(few.prefill);
  EXPECT_FALSE(few.prefill->problem.ragged);
  EXPECT_GT(few.prefill->splits, 1);
  EXPECT_LE(few.prefill->tiles, kH100.multiprocessors);
  const PrefillWorkspace at = PrefillWorkspace::of(few.prefill_at, few.problem, *few.prefill);
  EXPECT_EQ(at.forward, at.begins_q) << "there are no tables, and no lse of its own";

  const KvcachePlan many = plan(8, 1000, false), uneven = plan(2, 40, true);
  ASSERT_TRUE(many.prefill && uneven.prefill);
  EXPECT_TRUE(many.prefill->problem.ragged) << "tiles are handed out by the lengths that the GPU finds";
  EXPECT_TRUE(uneven.prefill->problem.ragged);
}

TEST(SelectKvcache, SplitsAreOfRowsThatHaveThem) {
  for_each_supported([](const KvcacheProblem& cache, const DeviceInfo& device) {
    const KvcachePlan plan = select_kvcache(cache, device);
    const int keys_of_item = groups_of(plan.variant) * plan.variant.tile_n;
    ASSERT_EQ(plan.keys_of_split > 0, cache.batch_invariant);
    ASSERT_EQ(plan.keys_of_split % keys_of_item, 0);
    const bool asked = cache.num_splits > 0;
    ASSERT_LE(plan.num_splits, asked ? cache.num_splits : 1);
    if (asked) {
      ASSERT_EQ(plan.num_splits > 0, cache.problem.seqlen_k > 0);
    }
    if (!asked && !cache.batch_invariant) {
      if (plan.num_splits == 1) {
        ASSERT_LE(cache.problem.seqlen_k, 3 * keys_of_item) << "only few keys are not divided";
      }
      ASSERT_FALSE(plan.splits_apart);
      return;
    }
    ASSERT_EQ(plan.variant.tile_m, 16);
    // The variant and its splits do not depend on the batch; only whether splits run at the same time does.
    KvcacheProblem alone = cache;
    alone.problem.batch = alone.problem.seqlen_q = 1;
    alone.problem.ragged = false;
    const KvcachePlan expected = select_kvcache(alone, device);
    ASSERT_EQ(plan.variant, expected.variant);
    ASSERT_EQ(plan.keys_of_split, expected.keys_of_split);
    ASSERT_EQ(plan.num_splits, expected.num_splits);
  });
}

TEST(SelectKvcache, ManyRowsHaveLargeTilesOnlyWithoutSplits) {
  for (const DeviceInfo& device : {kH100, kA100, kSmall}) {
    KvcacheProblem cache = decode(device, 4, 8, 4, 4096);
    EXPECT_EQ(select_kvcache(cache, device).variant.tile_m, 16);
    cache.problem.seqlen_q = 500;
    EXPECT_EQ(select_kvcache(cache, device).variant.tile_m, 64);
    cache.num_splits = 2;
    EXPECT_EQ(select_kvcache(cache, device).variant.tile_m, 16);
    cache.num_splits = 0;
    cache.batch_invariant = true;
    EXPECT_EQ(select_kvcache(cache, device).variant.tile_m, 16);
  }
}

TEST(SelectKvcache, LittleWorkHasFewTeams) {
  for (const DeviceInfo& device : {kH100, kA100, kSmall}) {
    const auto plan = [&](int batch, int heads_k, int capacity) {
      return select_kvcache(decode(device, batch, heads_k, 4, capacity), device);
    };
    const KvcachePlan large = plan(1, 1, 1 << 20);
    const int keys_of_item = groups_of(large.variant) * large.variant.tile_n;
    // Returns how few teams have a longest share of the keys that is no longer than that of `most` teams.
    const auto fewest = [&](int keys, int most) {
      const int items = (keys + keys_of_item - 1) / keys_of_item, longest = (items + most - 1) / most;
      return (items + longest - 1) / longest;
    };
    const int wave = device.multiprocessors * std::min(blocks_of_multiprocessor(large, device), 2);
    EXPECT_EQ(large.teams, fewest(1 << 20, wave));
    EXPECT_GT(large.teams, wave * 0.95);
    for (const int items : {3, 5}) {
      EXPECT_EQ(plan(1, 1, items * keys_of_item).teams, items);
      EXPECT_EQ(plan(1, 1, items * keys_of_item + 1).teams, items + 1);
      EXPECT_EQ(plan(3, 1, items * keys_of_item).teams, 3 * items);
    }
    for (const int items : {1, 2}) {
      const KvcachePlan few = plan(3, 1, items * keys_of_item);
      EXPECT_EQ(few.teams, 3) << "one thread block has them in flight at once";
      EXPECT_EQ(few.partials, 0);
    }
    EXPECT_EQ(plan(device.multiprocessors, 1, 3 * keys_of_item).num_splits, 1);
    const int parts = select_kvcache(decode(device, 1, 1, 16, 10000), device).teams;
    EXPECT_EQ(parts, fewest(10000, 25)) << "more parts take longer to join";
    EXPECT_EQ(plan(1, 1, 0).teams, 1);
    EXPECT_EQ(plan(1, 8, 1 << 20).teams, fewest(1 << 20, wave / 8));
    EXPECT_EQ(plan(1, 1000, 1 << 20).teams, 1);
    EXPECT_EQ(plan(1, 1000, 1 << 20).grid, 1000);
  }
}

TEST(SelectKvcache, ManyShortTilesHaveFourWarps) {
  const auto warps = [](int batch, int heads_k, int capacity) {
    return select_kvcache(decode(kH100, batch, heads_k, 1, capacity), kH100).variant.warps;
  };
  EXPECT_EQ(warps(64, 43, 195), 4);
  EXPECT_EQ(warps(64, 43, 4096), 8);
  EXPECT_EQ(warps(1, 43, 195), 8);
}

TEST(SelectKvcache, SplitsThatTakeMuchRoomAreOfOneThreadBlock) {
  const auto plan = [](int batch, int num_splits) {
    KvcacheProblem cache = decode(kH100, batch, 8, 4, 1 << 17);
    cache.num_splits = num_splits;
    return select_kvcache(cache, kH100);
  };
  EXPECT_FALSE(plan(1, 1).splits_apart);
  EXPECT_EQ(plan(1, 1).partials, 0);
  EXPECT_TRUE(plan(1, 2).splits_apart);
  EXPECT_EQ(plan(3, 7).partials, 21);
  EXPECT_FALSE(plan(1000, 64).splits_apart);
  EXPECT_EQ(plan(1000, 64).partials, 2 * plan(1000, 64).teams);  // one of even splits, one of odd ones for each
}

/// These are the tables of a call, where a kernel finds them; the tensors themselves have no memory.
struct Call {
  KvcacheProblem cache;
  std::vector<int> held, begins;
  KvcacheTensors tensors;

  Call(const KvcacheProblem& problem, std::vector<int> held_rows, std::vector<int> begin_rows)
      : cache(problem), held(std::move(held_rows)), begins(std::move(begin_rows)) {
    tensors.cache_seqlens.data = held.data();
    if (!begins.empty()) tensors.cu_seqlens_q.data = begins.data();
  }
};

template <int kM, int kItem>
std::int64_t items(const SplitKeys& schedule) {
  std::int64_t items = 0;
  for (int b = 0; b < schedule.queries.entries(); ++b) items += schedule.items_of<kM, kItem>(b);
  return items;
}

/// Returns the number of work items as the kernel counts them.
std::int64_t items_of(const KvcacheParams& params, const Variant& v) {
  switch (const int keys_of_item = groups_of(v) * v.tile_n; v.tile_m * 1000 + keys_of_item) {
    case 16064: return items<16, 64>(params.schedule);
    case 16128: return items<16, 128>(params.schedule);
    case 16256: return items<16, 256>(params.schedule);
    case 64064: return items<64, 64>(params.schedule);
    default: ADD_FAILURE() << "no case for " << name_of(v); return 0;
  }
}

/// Returns a call whose caches are full and whose queries take one row more than whole tiles, and a random one.
std::vector<Call> calls_of(const KvcacheProblem& cache, int tile_m) {
  const Problem& p = cache.problem;
  std::mt19937 random(2);
  std::vector<Call> calls;
  for (const bool full : {true, false}) {
    std::vector<int> held, begins;
    for (int b = 0; b < p.batch; ++b)
      held.push_back(full ? p.seqlen_k : static_cast<int>(random() % (p.seqlen_k + 1u)));
    if (p.ragged) {
      for (int b = 0; b <= p.batch; ++b)
        begins.push_back(full ? std::min(b * (tile_m / p.group() + 1), p.seqlen_q)
                              : static_cast<int>(random() % (p.seqlen_q + 1u)));
      std::ranges::sort(begins);
    }
    calls.emplace_back(cache, held, begins);
  }
  return calls;
}

TEST(SelectKvcache, TheWorkspaceHoldsPartialResultsAndTheRotatedQ) {
  alignas(64) static char memory[64];
  for_each_supported([](const KvcacheProblem& cache, const DeviceInfo& device) {
    const KvcachePlan plan = select_kvcache(cache, device);
    const Problem& p = cache.problem;
    for (const Call& call : calls_of(cache, plan.variant.tile_m)) {
      const KvcacheParams params = KvcacheParams::of(plan, call.tensors, memory, 1);
      const std::int64_t count = items_of(params, plan.variant);
      if (plan.splits_apart) {
        ASSERT_LE(count, plan.partials);
      } else if (params.schedule.splits()) {
        ASSERT_LE(count, plan.tiles / p.heads_k);  // one thread block computes all splits of a tile
      } else {
        ASSERT_GE(plan.partials, 2 * plan.teams);  // each team needs a slot for its first tile and one for its last
      }

      const std::int64_t places = std::int64_t{plan.partials} * p.heads_k;
      const auto at = [&](const void* place) { return static_cast<const char*>(place) - memory; };
      using Bytes = std::pair<std::int64_t, std::int64_t>;  // (begin, end)
      const auto bytes = [](std::int64_t begin, std::int64_t size) { return Bytes{begin, begin + size}; };
      std::vector<Bytes> parts = {
          bytes(at(params.partials.arrivals), places * 8),
          bytes(at(params.partials.state), places * plan.variant.tile_m * 8),
          bytes(at(params.partials.out), places * plan.variant.tile_m * plan.variant.head_dim * 4),
      };
      if (cache.rotary_dim > 0)
        parts.push_back(bytes(at(params.q), cache.queries() * p.heads_q * p.head_dim * bytes_of(p.dtype)));
      std::ranges::sort(parts);
      ASSERT_GE(parts.front().first, 0);
      for (std::size_t i = 1; i < parts.size(); ++i) ASSERT_GE(parts[i].first, parts[i - 1].second);
      ASSERT_LE(parts.back().second, plan.workspace_bytes);
      if (cache.rotary_dim > 0) {
        ASSERT_EQ(at(params.q) % 16, 0);
      }
      ASSERT_EQ(at(params.partials.arrivals) % 8, 0);
      ASSERT_EQ(at(params.partials.state) % 8, 0);
      ASSERT_EQ(at(params.partials.out) % 16, 0);  // it is accessed as float4
    }
  });
}

TEST(SelectKvcache, PlacesAreNoMoreThanFullCachesTake) {
  KvcacheProblem cache = decode(kH100, 3, 2, 4, 10000);
  cache.problem.seqlen_q = 9;  // 36 rows make three tiles
  for (const bool batch_invariant : {false, true}) {
    cache.batch_invariant = batch_invariant;
    cache.num_splits = batch_invariant ? 0 : 5;
    const KvcachePlan plan = select_kvcache(cache, kH100);
    const Call call(cache, {10000, 10000, 10000}, {});
    EXPECT_TRUE(plan.splits_apart);
    EXPECT_EQ(plan.partials, 3 * 3 * (batch_invariant ? 10 : 5));
    EXPECT_EQ(items_of(KvcacheParams::of(plan, call.tensors, nullptr, 1), plan.variant), plan.partials);
  }
}

TEST(SelectKvcache, TablesOnAGpuAreNotRead) {
  constexpr int kBatch = 4, kCapacity = 5000, kRows = 9;
  std::uintptr_t address = 64;  // an address that is never read
  const auto tensor = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
    address += 1 << 30;
    return contiguous(reinterpret_cast<void*>(address), dtype, shape, kH100.device);
  };
  KvcacheTensors t;
  t.q = t.out = tensor(DType::kBFloat16, {kRows, 8, 128});
  t.k_new = t.v_new = tensor(DType::kBFloat16, {kRows, 2, 128});
  t.k_cache = tensor(DType::kBFloat16, {kBatch, kCapacity, 2, 128});
  t.v_cache = tensor(DType::kBFloat16, {kBatch, kCapacity, 2, 128});
  t.rotary_cos = t.rotary_sin = tensor(DType::kBFloat16, {kCapacity, 32});
  t.cache_seqlens = t.leftpad = t.cache_batch_idx = tensor(DType::kInt32, {kBatch});
  t.cu_seqlens_q = tensor(DType::kInt32, {kBatch + 1});
  const KvcachePlan plan = plan_kvcache("attention_kvcache", t, {.attention = {.causal = true}}, kH100);
  KvcacheProblem cache = plan.cache;
  EXPECT_EQ(cache.problem.seqlen_k, kCapacity);
  cache.problem.seqlen_k = 100;
  EXPECT_LT(select_kvcache(cache, kH100).teams, plan.teams);
}

TEST(SelectKvcache, SplitsThatWouldTakeMoreRoomThan64BitsCountAreOfOneThreadBlock) {
  KvcacheProblem cache = decode(kA100, 1 << 6, 1 << 19, 1, (1 << 30) - 1);
  cache.problem.head_dim = 256;
  cache.num_splits = cache.problem.seqlen_k;
  const KvcachePlan plan = select_kvcache(cache, kA100);
  EXPECT_FALSE(plan.splits_apart);
  EXPECT_GE(plan.workspace_bytes, plan.partials * kvcache_place_bytes(plan.variant) * cache.problem.heads_k);
}

TEST(SelectKvcache, RefusesMoreThanIntCounts) {
  const auto refused = [](const KvcacheProblem& cache) {
    try {
      select_kvcache(cache, kH100);
    } catch (const Unsupported& error) {
      return std::string(error.what()).find("expected fewer than 2^31") != std::string::npos;
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
  holds(select_kvcache(cache, kH100), {"splits    of 1024 keys each"});

  KvcacheProblem prompts = in_pages(decode(kH100, 4, 8, 4, 4096), 64);
  prompts.problem.seqlen_q = 2048;
  const KvcachePlan prefill = select_kvcache(prompts, kH100);
  ASSERT_TRUE(prefill.prefill);
  EXPECT_EQ(holds(prefill, {"64 of 256 pages of 64 rows", name_of(prefill.variant)}).find("splits"), std::string::npos);
}

}  // namespace
}  // namespace flashtile
