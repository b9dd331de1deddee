// These tests check how batch-invariant calls divide keys on Hopper, and that nothing changes a row's bits: neither the
// block of keys in which a key is, nor the part that has it, depends on the batch, the chunk or the cache.
#include "flashtile/fixed_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "caches.h"

namespace flashtile {
namespace {

template <int kN>
VisibleKeys<kN> keys_of(Mask mask, Range rows, Lengths lengths) {
  return {mask, rows, lengths, mask.columns(rows.begin, lengths).begin / kN * kN};
}

/// These are the blocks of a walk, counted from key 0, and whether each needs a mask test.
template <int kN>
std::vector<std::pair<int, bool>> blocks_of(const VisibleKeys<kN>& keys) {
  std::vector<std::pair<int, bool>> blocks;
  const BlockWalk walk = keys.walk();
  for (int block = walk.first(); block < walk.end(); block = walk.next(block)) {
    EXPECT_EQ(keys.key(block) % kN, 0);
    blocks.emplace_back(keys.key(block) / kN, walk.is_edge(block));
  }
  return blocks;
}

template <int kN>
void check_shares(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int run = 0; run < 3000; ++run) {
    const Lengths lengths{1 + below(300), 1 + below(9000)};
    const Mask mask{Band{random() % 2 ? below(3000) : Band::kUnbounded, random() % 2 ? 0 : below(500)}};
    const int first = below(lengths.q);
    const Range rows{first, std::min(first + 64, lengths.q)};
    const VisibleKeys<kN> all = keys_of<kN>(mask, rows, lengths);
    FixedParts parts;
    parts.keys = keys_of_part({.tile_n = kN});
    parts.of_share = 1 + below(4);
    std::vector<std::pair<int, bool>> found;
    for (int share = 0; share * parts.of_share * parts.keys < lengths.k; ++share) {
      VisibleKeys<kN> taken = all;
      parts.take(share, taken);
      EXPECT_EQ(taken.lengths.k + taken.first, lengths.k);
      for (const auto& block : blocks_of<kN>(taken)) {
        EXPECT_EQ(block.first * kN / parts.keys / parts.of_share, share);
        found.push_back(block);
      }
      if (taken.blocks > 0) {
        EXPECT_LE(taken.first + taken.count, all.first + all.count);
      }
    }
    ASSERT_EQ(found, blocks_of<kN>(all)) << "run " << run;
  }
}

TEST(FixedParts, SharesTakeEachBlockOnceAndInOrder) {
  std::mt19937 random(1);
  check_shares<64>(random);
  check_shares<80>(random);
  check_shares<96>(random);
  check_shares<128>(random);
}

TEST(FixedParts, AKernelHasRoomForItsTiles) {
  for (const InvariantRow& row : invariant_rows()) {
    const FixedPartsMemory memory = FixedPartsMemory::of(row.variant);
    EXPECT_LE(memory.bytes, kH100.max_shared_memory) << name_of(row.variant);
    EXPECT_EQ(keys_of_part(row.variant) % row.variant.tile_n, 0);
    EXPECT_EQ(memory.bytes_of_sums > 0, row.variant.head_dim <= 128 || row.variant.tile_m == 64);
  }
}

/// Two calls give a row the same bits if their kernels have the same blocks of keys, and with them the same parts.
TEST(SelectInvariant, BlocksOfKeysGoByHeadDimensionsAlone) {
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    for (int head_dim_v = 8; head_dim_v <= 256; head_dim_v += 8) {
      std::set<int> found;
      for (const int batch : {1, 2, 500}) {
        for (const int seqlen_q : {1, 20, 600, 9000}) {
          for (const bool ragged : {false, true}) {
            KvcacheProblem cache = decode(kH100, batch, 2, 3, 9000);
            Problem& p = cache.problem;
            p.head_dim = head_dim, p.head_dim_v = head_dim_v;
            p.seqlen_q = seqlen_q * (ragged ? batch : 1);
            p.ragged = ragged;
            ASSERT_TRUE(has_invariant_kernel(p, kH100));
            Problem training = p;
            training.seqlen_k = seqlen_q * (ragged ? batch : 1);
            found.insert(select_forward(training, kH100, true).variant.tile_n);
            cache.batch_invariant = true;
            for (const int page_size : {1, 16, 48, 256}) {
              const KvcachePlan plan = select_kvcache(in_pages(cache, page_size), kH100);
              ASSERT_TRUE(plan.prefill);
              if (page_size > 1 || seqlen_q == 1) {
                EXPECT_FALSE(plan.widened) << "copied for many queries alone";
              } else if (seqlen_q == 9000) {
                EXPECT_TRUE(plan.widened) << "gathered anew for each tile of many queries";
              }
              found.insert(plan.prefill->variant.tile_n);
              EXPECT_EQ(plan.prefill->shared_memory, FixedPartsMemory::of(plan.prefill->variant).bytes);
            }
          }
        }
      }
      ASSERT_EQ(found.size(), 1u) << head_dim << ", " << head_dim_v;
    }
  }
}

TEST(SelectInvariant, TilesOfFewRowsAreSharedOut) {
  const auto plan = [](int batch, int seqlen_q, int capacity) {
    KvcacheProblem cache = decode(kH100, batch, 8, 4, capacity);
    cache.problem.seqlen_q = seqlen_q;
    cache.batch_invariant = true;
    return *select_kvcache(in_pages(cache, 16), kH100).prefill;
  };
  EXPECT_EQ(plan(1, 1, 8192).splits, 8);
  EXPECT_EQ(plan(1, 1, 1024).splits, 1);
  EXPECT_EQ(plan(128, 1, 8192).splits, 1);
  EXPECT_GT(plan(1, 30, 8192).splits, 1);
  EXPECT_EQ(plan(1, 4096, 8192).splits, 1);
  const ForwardPlan shared = plan(2, 1, 65536);
  EXPECT_GE(shared.workspace_bytes, shared.parts_at + std::int64_t{2} * 8 * 64 * shared.variant.tile_m * 128 * 4);
}

/// At D128 a tile of 128 rows has 80 keys, too, and is slower than the usual one: it serves where tall tiles would
/// leave many rows idle.
TEST(SelectInvariant, TilesOfD128AreTallUnlessManyOfTheirRowsWouldBeIdle) {
  const auto rows_of_tile = [](int batch, int seqlen, int heads_q, int heads_k) {
    Problem p = decode(kH100, batch, heads_q, heads_k, seqlen).problem;
    p.seqlen_q = seqlen;
    return select_forward(p, kH100, true).variant.tile_m;
  };
  EXPECT_EQ(rows_of_tile(16, 1024, 32, 8), 192);
  EXPECT_EQ(rows_of_tile(8, 2048, 32, 8), 192);
  EXPECT_EQ(rows_of_tile(4, 4096, 32, 8), 192);
  EXPECT_EQ(rows_of_tile(2, 8192, 32, 8), 192);
  EXPECT_EQ(rows_of_tile(64, 128, 16, 16), 128);
}

/// Thread blocks share the keys of tiles that are too few for the GPU, of many rows and of few, over a cache and
/// without.
TEST(SelectInvariant, FewTilesAreShared) {
  const auto plan_of = [](bool over_cache, int head_dim, int queries, int batch) {
    KvcacheProblem cache = in_pages(decode(kH100, batch, 8, 1, 8000), 64);
    cache.batch_invariant = true;
    cache.problem.seqlen_q = queries;
    cache.problem.head_dim = cache.problem.head_dim_v = head_dim;
    return over_cache ? *select_kvcache(cache, kH100).prefill : select_forward(cache.problem, kH100, true);
  };
  for (const bool over_cache : {false, true}) {
    for (const int head_dim : {64, 96, 128, 192, 256}) {
      for (const int queries : {256, 512}) {
        EXPECT_EQ(plan_of(over_cache, head_dim, queries, 1).variant.tile_m, 128) << head_dim;
        EXPECT_GT(plan_of(over_cache, head_dim, queries, 1).splits, 1) << head_dim;
      }
      EXPECT_EQ(plan_of(over_cache, head_dim, 64, 1).variant.tile_m, 64) << head_dim;
      EXPECT_GT(plan_of(over_cache, head_dim, 64, 1).splits, 1) << head_dim;
      EXPECT_EQ(plan_of(over_cache, head_dim, 512, 32).splits, 1) << head_dim;
    }
  }
}

/// Over keys in rows those for few queries serve tiles that are shared out, and of several ragged sequences none is.
TEST(SelectInvariant, RowsForFewQueriesServeSharesAlone) {
  for (const int keys : {1, 64, 1024, 3000, 100000}) {
    for (const int queries : {1, 64, 300, 5000}) {
      for (const int batch : {1, 100}) {
        Problem p = decode(kH100, batch, 4, 2, keys).problem;
        p.seqlen_q = queries;
        const ForwardPlan plan = select_forward(p, kH100, true);
        EXPECT_TRUE(plan.splits > 1 || !has_few_queries(plan.variant)) << to_string(p);
        EXPECT_TRUE(plan.splits == 1 || may_share_tiles(plan.variant)) << to_string(p);
        EXPECT_GE(plan.workspace_bytes, plan.parts_at + FixedParts::bytes(plan, keys));
        p.ragged = true, p.seqlen_q *= batch, p.seqlen_k *= batch;
        EXPECT_EQ(select_forward(p, kH100, true).splits, batch > 1 ? 1 : plan.splits);
      }
    }
  }
}

TEST(SelectInvariant, PlansFitTheGpu) {
  for_each_supported([](KvcacheProblem cache, const DeviceInfo& device) {
    cache.batch_invariant = true;
    cache.num_splits = 0;
    const Problem& p = cache.problem;
    const KvcachePlan plan = select_kvcache(cache, device);
    const bool is_empty = cache.queries() == 0 || p.batch == 0 || p.seqlen_k == 0;
    ASSERT_EQ(plan.prefill != nullptr, !is_empty && !is_fp8(cache.narrow) && has_invariant_kernel(p, device));
    if (!plan.prefill) return;
    const ForwardPlan& forward = *plan.prefill;
    const Variant& v = forward.variant;
    ASSERT_EQ(v.dtype, p.dtype);
    ASSERT_GE(v.head_dim, p.head_dim);
    ASSERT_GE(v.head_dim_v, p.head_dim_v);
    ASSERT_TRUE(forward.splits == 1 || may_share_tiles(v));
    ASSERT_EQ(forward.parts_at % 16, 0);
    ASSERT_EQ(forward.workspace_bytes, forward.parts_at + FixedParts::bytes(forward, p.seqlen_k));
    const FixedParts parts = FixedParts::of(forward, p.seqlen_k, nullptr);
    ASSERT_GE(std::int64_t{parts.shares.value} * parts.of_share * parts.keys, p.seqlen_k);
    const KvcachePlan& attends = plan.widened ? *plan.widened : plan;
    ASSERT_GE(attends.workspace_bytes, attends.prefill_at + forward.workspace_bytes);
  });
}

/// What has no kernel here has the same kernel in training and over a cache all the same.
TEST(SelectInvariant, OthersGoOverTheCacheByAmperesKernels) {
  const auto check = [](const std::function<void(Problem&)>& change) {
    KvcacheProblem cache = decode(kH100, 2, 8, 4, 3000);
    change(cache.problem);
    EXPECT_FALSE(has_invariant_kernel(cache.problem, kH100));
    cache.batch_invariant = true;
    const KvcachePlan plan = select_kvcache(in_pages(cache, 16), kH100);
    EXPECT_FALSE(plan.prefill);
    EXPECT_EQ(plan.variant.arch, Arch::kSm80);
  };
  check([](Problem& p) { p.softcap = 2 * kUsualSoftcap; });
  check([](Problem& p) { p.masks_of_entry = p.masked_entries = 1; });
  Problem on_ampere = decode(kA100, 2, 8, 4, 3000).problem;
  EXPECT_FALSE(has_invariant_kernel(on_ampere, kA100));
}

}  // namespace
}  // namespace flashtile
