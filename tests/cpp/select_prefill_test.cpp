// These tests say which calls over a cache Hopper's forward kernel takes, how, and what is copied for it.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "caches.h"
#include "flashtile/flashtile.h"
#include "flashtile/forward_memory.h"
#include "flashtile/prefill.h"

namespace flashtile {
namespace {

/// Rows wider than a problem need all of their width: they do not split keys that others multiply sooner whole.
TEST(SelectPrefill, WiderRowsDoNotSplitKeys) {
  KvcacheProblem cache = in_pages(decode(kH100, 64, 3, 1, 720), 48);
  cache.problem.seqlen_q = 87;
  cache.problem.head_dim = cache.problem.head_dim_v = 96;
  EXPECT_EQ(select_kvcache(cache, kH100).variant.head_dim, 96);
}

/// D96's rows take three boxes of TMA for so many keys as one of two halves takes two.
TEST(SelectPrefill, SmallPagesOfNarrowHeadsTakeRowsOfFewBoxes) {
  const auto row_of = [](int head_dim, int page_size, int batch) {
    KvcacheProblem cache = in_pages(decode(kH100, batch, 8, 4, 4096), page_size);
    cache.problem.seqlen_q = 300;
    cache.problem.head_dim = cache.problem.head_dim_v = head_dim;
    return select_kvcache(cache, kH100).variant.head_dim;
  };
  for (const int batch : {1, 40}) {
    for (const int head_dim : {80, 88, 96}) {
      EXPECT_EQ(row_of(head_dim, 16, batch), 128);
      EXPECT_EQ(row_of(head_dim, 64, batch), 96);
    }
    EXPECT_EQ(row_of(72, 16, batch), 128);
    EXPECT_EQ(row_of(72, 64, batch), 128);
    EXPECT_EQ(row_of(64, 16, batch), 64);
  }
  EXPECT_EQ(row_of(72, 4096, 1), 96) << "one page holds the sequence, and its boxes are as tall as a tile";
}

KvcacheProblem masked(KvcacheProblem cache, int masks) {
  cache.problem.masks_of_entry = masks;
  cache.problem.masked_entries = 1;
  cache.masked_keys = cache.problem.seqlen_q;
  return cache;
}

/// A copy of small pages has a cost of its own, whatever the number of queries, and room is found for it.
TEST(SelectPrefill, SmallPagesAreCopiedForManyRows) {
  const auto copies = [](int page_size, int seqlen_q, auto change) {
    KvcacheProblem cache = in_pages(decode(kH100, 4, 8, 4, 8192), page_size);
    cache.problem.seqlen_q = seqlen_q;
    cache.problem.max_logits = true;
    change(cache);
    const KvcachePlan plan = select_kvcache(cache, kH100);
    if (!plan.widened) return false;
    EXPECT_EQ(plan.widened->cache.page_size, cache.problem.seqlen_k);
    EXPECT_TRUE(plan.widened->problem.max_logits);
    const Problem& p = cache.problem;
    EXPECT_GE(plan.workspace_bytes, std::int64_t{p.batch} * p.seqlen_k * 8 * (p.head_dim + p.head_dim_v) * 2);
    return true;
  };
  const auto nothing = [](KvcacheProblem&) {};
  for (const int page_size : {1, 2, 3, 4, 12, 15, 18, 28}) {
    EXPECT_TRUE(copies(page_size, 200, nothing)) << page_size;
    EXPECT_FALSE(copies(page_size, 50, nothing)) << page_size;
  }
  for (const int page_size : {8, 24, 56}) {
    EXPECT_TRUE(copies(page_size, 270, nothing)) << page_size;
    EXPECT_FALSE(copies(page_size, 250, nothing)) << page_size;
  }
  for (const int page_size : {16, 48, 256}) EXPECT_FALSE(copies(page_size, 4096, nothing)) << page_size;
  EXPECT_FALSE(copies(1, 512, [](KvcacheProblem& cache) { cache.problem.band.left = 100; }));  // few keys are seen
  EXPECT_FALSE(copies(1, 512, [](KvcacheProblem& cache) { cache.problem.seqlen_k = 1 << 17; })) << "no room";
  EXPECT_FALSE(copies(1, 512, [](KvcacheProblem& cache) { cache.of_sequence = 1; }));
  EXPECT_TRUE(copies(16, 200, [](KvcacheProblem& cache) { cache.has_leftpad = true; }));
  EXPECT_FALSE(copies(16, 50, [](KvcacheProblem& cache) { cache.has_leftpad = true; }));
  EXPECT_TRUE(copies(16, 200, [](KvcacheProblem& cache) { cache.has_leftpad = true, cache.of_sequence = 1; }));
  EXPECT_TRUE(copies(16, 20, [](KvcacheProblem& cache) { cache.in_line = false; }));
  EXPECT_TRUE(copies(16, 20, [](KvcacheProblem& cache) { cache.in_line = false, cache.of_sequence = 1; }));
  EXPECT_TRUE(copies(16, 5, [](KvcacheProblem& cache) { cache.in_line = false; }));
  EXPECT_FALSE(copies(16, 4, [](KvcacheProblem& cache) { cache.in_line = false; }));
  EXPECT_TRUE(copies(16, 20, [](KvcacheProblem& cache) { cache.q_in_line = cache.in_line = false; }));
}

/// What TMA cannot load is gathered by the same kernels: small pages, and rows behind left padding, also of a
/// contiguous cache, with a column mask, too.
TEST(SelectPrefill, WhatIsNotCopiedIsGathered) {
  for (const int masks : {0, 1}) {
    for (const int head_dim : {64, 72, 96, 128, 192, 256}) {
      for (const bool leftpad : {false, true}) {
        KvcacheProblem cache = in_pages(decode(kH100, 4, 8, 4, 8192), leftpad ? 16 : 1);
        cache.has_leftpad = leftpad;
        cache.problem.seqlen_q = 20;
        cache.problem.head_dim = cache.problem.head_dim_v = head_dim;
        if (masks > 0) cache = masked(cache, masks);
        const KvcachePlan plan = select_kvcache(cache, kH100);
        ASSERT_TRUE(plan.prefill && !plan.widened) << to_string(plan);
        EXPECT_EQ(rows_of_box(cache, plan.variant), 0);
        EXPECT_FALSE(has_rows(plan));
        KvcacheProblem apart = cache;
        apart.in_line = false;
        const KvcachePlan copied = select_kvcache(apart, kH100);
        EXPECT_EQ(copied.widened != nullptr, masks == 0);
        if (copied.widened && head_dim != 72) {
          EXPECT_EQ(copied.widened->run, plan.run) << "how a cache lies changes no bits";
        }
        cache.has_table = false, cache.of_sequence = 1, cache.page_size = 8192;
        const KvcachePlan contiguous = select_kvcache(cache, kH100);
        EXPECT_EQ(rows_of_box(cache, contiguous.variant) == 0, leftpad);
        EXPECT_FALSE(leftpad && has_rows(contiguous));
        EXPECT_EQ(contiguous.prefill->problem.ragged, plan.prefill->problem.ragged);
      }
    }
  }
}

/// Hopper has no kernel for a large softcap. A cache is not copied for Ampere's, and a copy not once more.
TEST(SelectPrefill, NothingIsCopiedForKernelsThatDoNotServe) {
  for (const bool in_line : {false, true}) {
    for (const int page_size : {1, 16}) {
      KvcacheProblem cache = in_pages(decode(kH100, 4, 8, 4, 8192), page_size);
      cache.problem.seqlen_q = 512;
      cache.problem.softcap = 1e6f;
      cache.in_line = in_line;
      const KvcachePlan plan = select_kvcache(cache, kH100);
      EXPECT_FALSE(plan.widened || plan.prefill);
      EXPECT_EQ(plan.variant.arch, Arch::kSm80);
    }
  }
}

/// A column mask of the last keys changes nothing of a plan, on Ampere and, where sequences have many rows, on Hopper.
/// There a contiguous cache is planned as one that has a page for each sequence, and heads of a group that have masks
/// of their own are left to the kernels over a cache, as are 8-bit numbers.
TEST(SelectPrefill, ColumnMasksAskForNoOtherPlan) {
  const auto expect_same = [](const KvcachePlan& found, const KvcachePlan& expected, int queries) {
    EXPECT_EQ(name_of(found.variant), name_of(expected.variant));
    EXPECT_EQ(found.prefill == nullptr, expected.prefill == nullptr);
    EXPECT_EQ(found.grid, expected.grid);
    EXPECT_EQ(found.workspace_bytes, expected.workspace_bytes);
    EXPECT_NE(to_string(found).find("the last " + std::to_string(queries) + " keys"), std::string::npos);
  };
  for (const DeviceInfo& device : {kH100, kA100, kSmall}) {
    for (const bool paged : {false, true}) {
      for (const int queries : {1, 8, 64, 5000}) {
        KvcacheProblem cache = decode(device, 4, 8, 4, 4096);
        cache.q_in_line = cache.in_line = true;
        if (paged) cache = in_pages(cache, 64);
        cache.problem.seqlen_q = queries;
        KvcacheProblem over_pages = cache;
        over_pages.has_table = true;
        for (const int masks : {1, 8})
          expect_same(select_kvcache(masked(cache, masks), device), select_kvcache(over_pages, device), queries);
        DeviceInfo ampere = device;
        if (device.compute_capability == 90) ampere.compute_capability = 80;
        KvcacheProblem left = cache;  // to the kernels over a cache
        left.in_line = false;
        for (const int masks : {1, 32})
          expect_same(select_kvcache(masked(left, masks), device), select_kvcache(left, ampere), queries);
        expect_same(select_kvcache(masked(cache, 32), device), select_kvcache(left, ampere), queries);
        cache.narrow = left.narrow = DType::kE4M3;
        for (const bool of_rows : {false, true}) {
          cache.descales_of_rows = left.descales_of_rows = of_rows;
          expect_same(select_kvcache(masked(cache, 1), device), select_kvcache(left, ampere), queries);
        }
      }
    }
  }
}

/// Under such a mask many tiles go over the rows of a contiguous cache, which has no page then, unless scores are
/// mapped.
TEST(SelectPrefill, ManyTilesUnderAColumnMaskGoOverRows) {
  const auto goes_over_rows = [](int batch, auto&& change, int masks = 1) {
    KvcacheProblem cache = decode(kH100, batch, 8, 4, 4096);
    cache.q_in_line = cache.in_line = true;
    cache.problem.seqlen_q = 64;
    change(cache);
    const KvcachePlan plan = select_kvcache(masks > 0 ? masked(cache, masks) : cache, kH100);
    EXPECT_NE(plan.prefill, nullptr);
    return plan.prefill && has_rows(plan);
  };
  const auto nothing = [](KvcacheProblem&) {};
  EXPECT_TRUE(goes_over_rows(64, nothing));
  EXPECT_FALSE(goes_over_rows(64, nothing, 0)) << "the row of forward.def serves";
  EXPECT_FALSE(goes_over_rows(1, nothing)) << "a dense batch, of pages";
  EXPECT_FALSE(goes_over_rows(64, [](KvcacheProblem& cache) { cache = in_pages(cache, 64); }));
  EXPECT_FALSE(goes_over_rows(64, [](KvcacheProblem& cache) { cache.problem.softcap = 9; }));
  EXPECT_FALSE(goes_over_rows(64, [](KvcacheProblem& cache) { cache.problem.alibi = true; }));
}

TEST(SelectPrefill, ManyRowsGoThroughTheForwardKernelOnHopper) {
  const auto plan = [](const DeviceInfo& device, auto&& change) {
    KvcacheProblem cache = decode(device, 4, 8, 4, 4096);
    cache.problem.seqlen_q = 500;
    cache.q_in_line = cache.in_line = true;
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
  const KvcachePlan apart = plan(kH100, [](KvcacheProblem& cache) { cache.has_gaps = true; });
  const KvcachePlan in_table = plan(kH100, [](KvcacheProblem& cache) { cache.has_table = true; });
  EXPECT_EQ(name_of(apart.variant), name_of(in_table.variant)) << "of one page each";
  EXPECT_EQ(apart.run, in_table.run);
  EXPECT_FALSE(plan(kA100, nothing).prefill);
  EXPECT_TRUE(plan(kH100, [](KvcacheProblem& cache) { cache.in_line = false; }).widened) << "copied";
  const KvcachePlan with_gaps = plan(kH100, [](KvcacheProblem& cache) { cache.q_in_line = false; });
  EXPECT_GT(with_gaps.tiles, kH100.multiprocessors);
  EXPECT_FALSE(with_gaps.prefill->problem.ragged);
  EXPECT_EQ(with_gaps.run, in_table.run);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.num_splits = 2; }).prefill);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.seqlen_q = 4; }).prefill);  // that makes 16 rows
  EXPECT_TRUE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.seqlen_q = 5; }).prefill);
  const auto narrow = [](KvcacheProblem& cache) {
    cache.problem.seqlen_q = 7, cache.problem.head_dim = cache.problem.head_dim_v = 64;
  };
  EXPECT_TRUE(plan(kH100, narrow).prefill);
  for (const int batch : {4, 16}) {  // ragged sequences have to be more, or longer
    const auto ragged = [&](KvcacheProblem& cache) {
      cache.problem.ragged = true;
      cache.problem.batch = batch;
      cache.problem.seqlen_q = 7 * batch;
    };
    EXPECT_EQ(plan(kH100, ragged).prefill != nullptr, batch == 16);
    EXPECT_TRUE(plan(kH100, [&](KvcacheProblem& cache) { ragged(cache), cache.problem.seqlen_q += batch; }).prefill);
  }
  EXPECT_FALSE(plan(kH100, [&](KvcacheProblem& cache) { narrow(cache), cache.problem.batch = 1; }).prefill);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.batch = 0; }).prefill);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.seqlen_k = 0; }).prefill);
  // With few tiles and many keys, only splits of the keys fill the GPU.
  const KvcachePlan few =
      plan(kH100, [](KvcacheProblem& cache) { cache.problem.batch = 1, cache.problem.seqlen_q = 50; });
  ASSERT_TRUE(few.prefill);
  EXPECT_GT(few.prefill->splits, 1);
  EXPECT_FALSE(plan(kH100, [](KvcacheProblem& cache) { cache.problem.seqlen_k = 1 << 28; }).prefill);
}

/// In a mixed batch Hopper's forward goes over the chunks, and a kernel over a cache over the other sequences, in the
/// same workspace. The plan goes by shapes alone.
TEST(SelectPrefill, AMixedBatchHasTwoKernelsOnHopper) {
  const auto plan = [](int batch, int queries, int group, const std::function<void(KvcacheProblem&)>& change) {
    KvcacheProblem cache = in_pages(decode(kH100, batch, 8, group, 8192), 16);
    cache.problem.ragged = true;
    cache.problem.seqlen_q = queries;
    change(cache);
    return select_kvcache(cache, kH100);
  };
  const auto nothing = [](KvcacheProblem&) {};
  for (const int rotary_dim : {0, 64}) {
    for (const bool has_table : {true, false}) {
      const KvcachePlan found = plan(129, 512 + 128, 4, [&](KvcacheProblem& cache) {
        cache.rotary_dim = rotary_dim;
        cache.has_table = has_table;
      });
      ASSERT_TRUE(found.prefill && found.few);
      const KvcachePlan& few = *found.few;
      EXPECT_EQ(found.prefill->splits, 1);
      EXPECT_EQ(few.most_queries, 4);  // 16 rows
      EXPECT_EQ(few.variant.arch, Arch::kSm80);
      EXPECT_LE(few.tiles, 8 * 129 * ((4 * 4 + few.variant.tile_m - 1) / few.variant.tile_m));
      EXPECT_EQ(few.problem, found.problem);
      EXPECT_EQ(found.rotated_at, few.rotated_at);
      EXPECT_EQ(found.prefill_at, few.workspace_bytes);
      const PrefillWorkspace at = PrefillWorkspace::of(found.prefill_at, found.problem, *found.prefill);
      EXPECT_GE(at.used_q - at.used_k, 129 * 4);
      EXPECT_GE(found.workspace_bytes, at.forward + found.prefill->workspace_bytes);
      EXPECT_NE(to_string(found).find("sequences of up to 4 queries go through sm80"), std::string::npos);
    }
  }
  for (const auto& [batch, queries] : {std::pair(64, 8), {16, 32}, {8, 64}, {64, 32}}) {
    const KvcachePlan drafts = plan(batch, batch * queries, 4, nothing);
    EXPECT_EQ(drafts.packed_heads, 4) << "tiles of one head would be empty for the most part";
  }
  const KvcachePlan masked = plan(129, 512 + 128, 4, [](KvcacheProblem& cache) {
    cache.problem.masks_of_entry = cache.problem.masked_entries = 1;
    cache.masked_keys = 7;
  });
  ASSERT_TRUE(masked.prefill && masked.few);
  EXPECT_EQ(masked.few->cache.masked_keys, 7) << "both kernels ask the mask";
  EXPECT_TRUE(masked.problem.column_masked() && masked.few->problem.column_masked());
  EXPECT_TRUE(plan(129, 512 + 128, 1, nothing).few) << "though the mean has few rows";
  EXPECT_FALSE(plan(129, 129 * 512, 4, nothing).few) << "each may be a chunk";
  EXPECT_FALSE(plan(129, 129 + 100, 4, nothing).few) << "none can be a chunk";
  EXPECT_FALSE(plan(1, 400, 4, nothing).few);
  EXPECT_FALSE(plan(129, 640, 71, nothing).few) << "a token is many rows";
  EXPECT_FALSE(plan(129, 640, 4, [](KvcacheProblem& cache) { cache.narrow = DType::kE4M3; }).few);
  EXPECT_FALSE(plan(129, 640, 4, [](KvcacheProblem& cache) { cache.num_splits = 2; }).few);
  EXPECT_FALSE(plan(129, 640, 4, [](KvcacheProblem& cache) { cache.batch_invariant = true; }).few);
  EXPECT_FALSE(plan(129, 640, 4, [](KvcacheProblem& cache) { cache.in_line = false; }).few);
}

/// Where chunks have too few tiles for the GPU, their keys are split, but not among so many other sequences that the
/// empty parts of these would take longer.
TEST(SelectPrefill, KeysOfFewChunksAreSplit) {
  const auto splits = [](int batch, int queries, int heads_k, int keys) {
    KvcacheProblem cache = in_pages(decode(kH100, batch, heads_k, 1, keys), 16);
    cache.problem.ragged = true;
    cache.problem.seqlen_q = queries;
    const KvcachePlan plan = select_kvcache(cache, kH100);
    EXPECT_TRUE(plan.few);
    return plan.prefill->splits;
  };
  EXPECT_GT(splits(3, 3 * 118, 2, 8192), 4);
  EXPECT_GT(splits(17, 512 + 16, 2, 8192), 1);
  EXPECT_EQ(splits(129, 512 + 128, 2, 8192), 1) << "many other sequences";
  EXPECT_EQ(splits(17, 512 + 16, 32, 8192), 1) << "many tiles";
}

/// With ALiBi a tile of Hopper's forward has rows of one head alone, and is left to Ampere's kernel where these are few
/// beside the rows of a KV head.
TEST(SelectPrefill, FewRowsOfEachHeadWithAlibiAreLeftToAmpere) {
  const auto is_on_hopper = [](int queries, int group, int head_dim, bool alibi) {
    KvcacheProblem cache = in_pages(decode(kH100, 32, 2, group, 4096), 16);
    cache.problem.seqlen_q = queries;
    cache.problem.head_dim = cache.problem.head_dim_v = head_dim;
    cache.problem.alibi = alibi;
    return select_kvcache(cache, kH100).prefill != nullptr;
  };
  for (const int head_dim : {64, 128, 192}) {
    EXPECT_TRUE(is_on_hopper(4, 16, head_dim, false));
    EXPECT_FALSE(is_on_hopper(4, 16, head_dim, true));
    EXPECT_TRUE(is_on_hopper(100, 16, head_dim, true));
    EXPECT_TRUE(is_on_hopper(64, 1, head_dim, true));
  }
}

/// Few rows of 8 bits go through the forward kernel that widens them, which needs no memory for that. For many a kernel
/// ahead widens them once, as it does where rows have descales of their own, or where a box of TMA has too few of a
/// page, unless there is but one tile of rows: that is left to Ampere's kernel, as what the forward kernel does not
/// serve.
TEST(SelectPrefill, ManyRowsOf8BitsAreWidenedOnHopper) {
  const auto plan = [](const DeviceInfo& device, int seqlen_q, int capacity, auto&& change) {
    KvcacheProblem cache = in_pages(decode(device, 4, 8, 4, capacity), 16);
    cache.narrow = DType::kE4M3;
    cache.problem.seqlen_q = seqlen_q;
    cache.rotary_dim = 64;
    cache.appends = true;
    cache.seqlen_new = seqlen_q;
    change(cache);
    return select_kvcache(cache, device);
  };
  const auto nothing = [](KvcacheProblem&) {};
  const auto expect_meanwhile = [](const KvcachePlan& found) {
    ASSERT_TRUE(found.prefill) << to_string(found);
    EXPECT_FALSE(found.widened) << to_string(found);
    EXPECT_EQ(found.variant.arch, Arch::kSm90);
    EXPECT_EQ(found.variant.dtype, DType::kE4M3);
    EXPECT_EQ(found.prefill->variant.dtype, DType::kBFloat16);
    EXPECT_EQ(found.shared_memory, ForwardMemorySm90::of(found.prefill->variant, true).bytes);
    EXPECT_LE(found.shared_memory, kH100.max_shared_memory);
  };
  const auto expect_ampere = [](const KvcachePlan& found) {
    EXPECT_FALSE(found.prefill || found.widened) << to_string(found);
    EXPECT_EQ(found.variant.arch, Arch::kSm80);
  };
  expect_meanwhile(plan(kH100, 17, 8192, nothing));  // 68 rows of a KV head
  expect_meanwhile(plan(kH100, 256, 8192, nothing));
  expect_meanwhile(plan(kH100, 256, 1 << 17, nothing));
  expect_meanwhile(plan(kH100, 1024, 1 << 17, nothing));  // whose rows take 2 GiB in 16 bits
  expect_meanwhile(plan(kH100, 256, 8192, [](KvcacheProblem& cache) { cache.has_table = false; }));
  const auto of_one_page = [](KvcacheProblem& cache) { cache.of_sequence = 1, cache.page_size = 8191; };
  expect_meanwhile(plan(kH100, 256, 8191, of_one_page));
  expect_meanwhile(plan(kH100, 5, 8192, nothing));  // 20 rows
  expect_ampere(plan(kH100, 4, 8192, nothing));
  expect_ampere(plan(kH100, 16, 8192, [](KvcacheProblem& cache) { cache.descales_of_rows = true; }));  // one tile
  expect_meanwhile(plan(kH100, 16, 8192, [](KvcacheProblem& cache) { cache.page_size = 8; }));
  expect_ampere(plan(kH100, 16, 8192, [](KvcacheProblem& cache) { cache.page_size = 2; }));
  expect_ampere(plan(kA100, 512, 8192, nothing));
  expect_ampere(plan(kH100, 16, 8192, [](KvcacheProblem& cache) { cache.in_line = false; }));
  expect_ampere(plan(kH100, 512, 1 << 17, [](KvcacheProblem& cache) { cache.descales_of_rows = true; }));

  const auto expect_ahead = [](const KvcachePlan& found) {
    ASSERT_TRUE(found.widened) << to_string(found);
    EXPECT_EQ(found.variant, found.widened->variant);
    EXPECT_EQ(found.variant.dtype, DType::kBFloat16);
    const KvcacheProblem& wide = found.widened->cache;
    EXPECT_FALSE(wide.appends || wide.rotary_dim > 0 || wide.has_table);
    EXPECT_EQ(wide.page_size, 8192);
    const std::int64_t rows = std::int64_t{4} * 8192 * 8 * 256 * 2;  // bytes of K and V
    EXPECT_GE(found.workspace_bytes, found.widened_at + rows + found.widened->workspace_bytes);
  };
  expect_ahead(plan(kH100, 2048, 8192, nothing));
  expect_ahead(plan(kH100, 256, 8192, [](KvcacheProblem& cache) { cache.descales_of_rows = true; }));
  expect_ahead(plan(kH100, 256, 8192, [](KvcacheProblem& cache) { cache.page_size = 2; }));
  expect_ahead(plan(kH100, 17, 8192, [](KvcacheProblem& cache) { cache.in_line = false; }));
  expect_ahead(plan(kH100, 256, 8192, [](KvcacheProblem& cache) { cache.problem.sinks = true; }));
}

/// A contiguous cache, too, which has a page for each sequence then.
TEST(SelectPrefill, FewTilesOverPagesAreADenseBatch) {
  const auto plan = [](int batch, int seqlen_q, bool ragged, bool paged = true, bool max_logits = false) {
    KvcacheProblem cache = decode(kH100, batch, 8, 4, 4096);
    cache.q_in_line = cache.in_line = true;
    cache.problem.max_logits = max_logits;
    if (paged) cache = in_pages(cache, 16);
    cache.problem.seqlen_q = seqlen_q;
    cache.problem.ragged = ragged;
    return select_kvcache(cache, kH100);
  };
  for (const bool paged : {true, false}) {
    for (const bool max_logits : {true, false}) {
      const KvcachePlan few = plan(2, 40, false, paged, max_logits);
      ASSERT_TRUE(few.prefill);
      EXPECT_FALSE(few.prefill->problem.ragged);
      EXPECT_GT(few.prefill->splits, 1);
      EXPECT_LE(few.prefill->tiles, kH100.multiprocessors);
      const PrefillWorkspace at = PrefillWorkspace::of(few.prefill_at, few.problem, *few.prefill);
      EXPECT_EQ(at.forward, at.begins_q) << "there are no tables, and no lse of its own";
    }
  }

  const KvcachePlan many = plan(8, 1000, false), uneven = plan(2, 40, true);
  ASSERT_TRUE(many.prefill && uneven.prefill);
  EXPECT_TRUE(many.prefill->problem.ragged) << "tiles are handed out by the lengths that the GPU finds";
  EXPECT_TRUE(uneven.prefill->problem.ragged);
}

}  // namespace
}  // namespace flashtile
