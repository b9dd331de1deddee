// These tests check how plans of attention over a cache divide keys among a GPU's thread blocks, and that there is room
// for all that a kernel writes, whatever the tables hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "caches.h"
#include "flashtile/flashtile.h"
#include "flashtile/registry.h"
#include "flashtile/scheduler/split_keys.h"
#include "views.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"  // this header is written for nvcc
#include "flashtile/kvcache_params.h"
#pragma GCC diagnostic pop

namespace flashtile {
namespace {

TEST(SelectKvcache, SplitsAreOfRowsThatHaveThem) {
  for_each_supported([](const KvcacheProblem& cache, const DeviceInfo& device) {
    const KvcachePlan plan = select_kvcache(cache, device);
    if (plan.prefill) return;  // batch-invariant, on Hopper: see fixed_parts_test.cpp
    const int keys_of_item = groups_of(plan.variant) * plan.variant.tile_n;
    ASSERT_EQ(plan.keys_of_split > 0, cache.batch_invariant);
    ASSERT_EQ(plan.keys_of_split % keys_of_item, 0);
    const bool asked = cache.num_splits > 0;
    ASSERT_LE(plan.num_splits, asked ? cache.num_splits : 1);
    if (asked) {
      ASSERT_EQ(plan.num_splits > 0, cache.problem.seqlen_k > 0);
    }
    if (!asked && !cache.batch_invariant) {
      if (plan.num_splits == 1 && plan.variant.warps > 1 && cache.problem.seqlen_k > 9 * keys_of_item) {
        ASSERT_LE(plan.grid, 2 * device.multiprocessors) << "others are divided";
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
    if (expected.prefill) return;  // and this one has no row, or no key
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
    const KvcachePlan many = select_kvcache(cache, device);
    EXPECT_EQ(many.widened != nullptr, device.compute_capability == 90) << "the forward kernel over a copy";
    EXPECT_TRUE(many.widened || many.variant.tile_m == 64);
    cache.num_splits = 2;
    EXPECT_EQ(select_kvcache(cache, device).variant.tile_m, 16);
    cache.num_splits = 0;
    cache.batch_invariant = true;
    const KvcachePlan invariant = select_kvcache(cache, device);
    EXPECT_TRUE(invariant.prefill || invariant.variant.tile_m == 16);
  }
}

/// A tile of 64 rows takes long for its keys, however few there are, so that little work has more tiles of 16 rows.
TEST(SelectKvcache, LittleWorkHasSmallTiles) {
  for (const auto& [batch, keys] : {std::pair(1, 8192), {16, 2048}, {128, 8192}, {256, 512}}) {
    KvcacheProblem cache = decode(kA100, batch, 1, 8, keys);
    cache.problem.seqlen_q = 8;
    EXPECT_EQ(select_kvcache(cache, kA100).variant.tile_m, batch > 64 ? 64 : 16) << batch;
  }
}

/// Returns how many thread blocks share a tile of a call in which each sequence is a tile of `heads_k`.
double blocks_of_tile(const DeviceInfo& device, int batch, int heads_k, int group, int capacity) {
  const KvcachePlan plan = select_kvcache(decode(device, batch, heads_k, group, capacity), device);
  EXPECT_EQ(plan.variant.tile_m, 16);
  return static_cast<double>(plan.teams) / batch;
}

TEST(SelectKvcache, TilesAreSharedWhereThatPays) {
  for (const DeviceInfo& device : {kH100, kA100, kSmall}) {
    const KvcachePlan large = select_kvcache(decode(device, 1, 1, 4, 1 << 20), device);
    const int keys_of_item = groups_of(large.variant) * large.variant.tile_n;
    const int wave = device.multiprocessors * std::min(blocks_of_multiprocessor(large, device), 2);
    const auto of_tile = [&](int batch, int heads_k, int items, int group = 4) {
      return blocks_of_tile(device, batch, heads_k, group, items * keys_of_item);
    };
    EXPECT_GT(large.teams, wave / 2) << "so many keys are worth most of the GPU";
    EXPECT_LE(large.teams, wave);
    EXPECT_GT(of_tile(1, 8, (1 << 20) / keys_of_item), wave / 8 * 0.9);
    for (const int items : {1, 2}) {
      for (const int batch : {1, 3, device.multiprocessors / 2}) {
        const KvcachePlan few = select_kvcache(decode(device, batch, 1, 4, items * keys_of_item), device);
        EXPECT_EQ(few.teams, batch) << "one thread block has them in flight at once";
        EXPECT_EQ(few.partials, 0);
      }
    }
    for (const int batch : {1, 2, 5, 16}) {
      double fewer = 1;
      for (int items = 3; items < 300; items = items * 5 / 4 + 1) {
        const double blocks = of_tile(batch, 1, items);
        EXPECT_LE(blocks, items);
        EXPECT_LE(blocks * batch, wave);
        EXPECT_GE(blocks * 2, fewer) << batch << " tiles of " << items << " blocks of keys: shares may be as long";
        fewer = blocks;
      }
      EXPECT_GT(fewer, 1);
    }
    EXPECT_GE(of_tile(2, 1, 20, 1), of_tile(2, 1, 20, 16)) << "parts of more rows take longer to join";
    EXPECT_LT(of_tile(device.multiprocessors * 2 / 3, 1, 6), 1.1) << "a tile for most multiprocessors is taken whole,";
    EXPECT_GT(of_tile(device.multiprocessors * 2 / 3, 1, 200), 1.1) << "unless it is long";
    EXPECT_EQ(of_tile(1, 1000, 4096), 1);
  }
}

/// A token of each sequence is the same work in a ragged batch.
TEST(SelectKvcache, RaggedTokensAreSharedAsTokensOfABatch) {
  for (const DeviceInfo& device : {kH100, kA100, kSmall}) {
    for (const int batch : {1, 7, 40, 300}) {
      for (const int capacity : {100, 1000, 5000, 60000}) {
        KvcacheProblem cache = decode(device, batch, 4, 4, capacity);
        const KvcachePlan dense = select_kvcache(cache, device);
        cache.problem.ragged = true;
        cache.problem.seqlen_q = batch;
        const KvcachePlan ragged = select_kvcache(cache, device);
        EXPECT_EQ(ragged.variant, dense.variant) << batch << " sequences of " << capacity;
        EXPECT_EQ(ragged.teams, dense.teams);
        EXPECT_EQ(ragged.num_splits, dense.num_splits);
        EXPECT_EQ(ragged.passes_by, dense.passes_by);
      }
    }
  }
}

TEST(SelectKvcache, ManyShortTilesHaveFewWarps) {
  const auto plan_of = [](int batch, int heads_k, int group, int capacity, Band band = Band::causal()) {
    KvcacheProblem cache = decode(kH100, batch, heads_k, group, capacity);
    cache.problem.band = band;
    return select_kvcache(cache, kH100);
  };
  const auto warps = [&](auto... of) { return plan_of(of...).variant.warps; };
  EXPECT_EQ(warps(1, 43, 1, 195), 8);
  EXPECT_EQ(warps(8, 16, 1, 195), 8);
  EXPECT_EQ(warps(12, 16, 1, 195), 4);
  EXPECT_EQ(warps(64, 8, 8, 195), 1);
  EXPECT_EQ(warps(64, 8, 8, 4096), 8);
  EXPECT_EQ(warps(64, 8, 8, 4096, Band{127, 0}), 1) << "a row sees few of the keys";
  EXPECT_EQ(warps(64, 43, 1, 4096), 1) << "parts of one row are short to join";
  EXPECT_EQ(plan_of(64, 8, 8, 195).num_splits, 1) << "a warp takes a short tile whole,";
  EXPECT_EQ(plan_of(64, 43, 1, 4096).num_splits, 0) << "and warps share long ones";
  EXPECT_EQ(plan_of(64, 8, 8, 195).grid, 64 * 8);
  EXPECT_GE(plan_of(512, 8, 8, 195).grid, 6 * kH100.multiprocessors) << "so many warps hide what memory takes";
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
    case 8064: return items<8, 64>(params.schedule);
    case 8128: return items<8, 128>(params.schedule);
    case 8192: return items<8, 192>(params.schedule);
    case 16016: return items<16, 16>(params.schedule);
    case 16032: return items<16, 32>(params.schedule);
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
    if (plan.prefill) return;
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
  KvcacheProblem cache = decode(kA100, 3, 2, 4, 10000);
  cache.problem.seqlen_q = 9;  // 36 rows make three tiles
  for (const bool batch_invariant : {false, true}) {
    cache.batch_invariant = batch_invariant;
    cache.num_splits = batch_invariant ? 0 : 5;
    const KvcachePlan plan = select_kvcache(cache, kA100);
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
  t.q = tensor(DType::kBFloat16, {kRows, 8, 128});
  t.out = tensor(DType::kBFloat16, {kRows, 8, 128});
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

}  // namespace
}  // namespace flashtile
