// These tests check plans of the backward: which kernel, how many heads' blocks are interleaved, and how much memory
// beside the gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flashtile/backward_order.h"
#include "flashtile/flashtile.h"
#include "flashtile/registry.h"
#include "flashtile/scheduler/sections.h"
#include "flashtile/workspace.h"
#include "problems.h"

namespace flashtile {
namespace {

TEST(SelectBackward, OnHopperTakesTwoPassesOfWideHeads) {
  const DeviceInfo device = gpu(90, 227);
  for (int d = 8; d <= 256; d += 8) {
    Problem problem = problem_on(device, DType::kFloat16, d, d, 300);
    problem.batch = 40;  // enough blocks of keys for each to have one part
    const BackwardPlan plan = select_backward(problem, device);
    EXPECT_EQ(plan.variant.arch, Arch::kSm90);
    EXPECT_EQ(plan.variant.two_passes(), d > 128);
    // There are 40 sequences with 2 KV heads of 5 or 3 blocks; where a second pass forms dQ, also 8 heads of 3 tiles,
    // and no dq in the workspace.
    const int rows = 40 * 8 * 384;
    EXPECT_EQ(plan.tiles, d > 128 ? 40 * 2 * 5 + 40 * 8 * 3 : 40 * 2 * 3);
    EXPECT_EQ(plan.grid, std::min<std::int64_t>(plan.tiles, device.multiprocessors));
    if (d > 128) {
      EXPECT_EQ(plan.workspace_bytes, 4 * 4 * rows + 4 + 4);
    }
  }
}

TEST(SelectBackward, OnHopperFewQueriesOfManyKeysTakeAmperesKernel) {
  const DeviceInfo device = gpu(90, 227);
  const auto on_ampere = [&](int head_dim, int batch, int heads, int seqlen_q, int seqlen_k,
                             bool deterministic = false) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen_k);
    problem.batch = batch;
    problem.heads_q = problem.heads_k = heads;
    problem.seqlen_q = seqlen_q;
    problem.band = Band::full();
    problem.deterministic = deterministic;
    const BackwardPlan plan = select_backward(problem, device);
    return plan.variant.arch == Arch::kSm80;
  };
  // In wide heads a tile of dQ goes through all keys.
  EXPECT_TRUE(on_ampere(256, 1, 8, 49, 4096));
  EXPECT_TRUE(on_ampere(256, 6, 1, 49, 381));
  EXPECT_TRUE(on_ampere(192, 1, 2, 128, 8192));
  EXPECT_FALSE(on_ampere(256, 1, 8, 49, 4096, true)) << "only two passes have no sums whose order could differ";
  EXPECT_FALSE(on_ampere(256, 16, 4, 49, 256)) << "tiles are many";
  EXPECT_FALSE(on_ampere(256, 1, 8, 4096, 4096)) << "queries are many";
  EXPECT_FALSE(on_ampere(256, 1, 8, 64, 64)) << "keys are few";
  // In narrow heads most of a tile of 128 queries would be empty.
  EXPECT_TRUE(on_ampere(64, 32, 8, 16, 512));
  EXPECT_TRUE(on_ampere(32, 1, 16, 64, 8192));
  EXPECT_FALSE(on_ampere(64, 32, 8, 65, 512));
  EXPECT_FALSE(on_ampere(64, 2, 4, 16, 1024)) << "blocks of keys are few, and Hopper's begin sooner";
  EXPECT_FALSE(on_ampere(128, 32, 8, 16, 512)) << "tiles of both have 64 queries";
  EXPECT_FALSE(on_ampere(64, 32, 8, 0, 512));
  EXPECT_FALSE(on_ampere(256, 1, 8, 49, 0));
  EXPECT_FALSE(on_ampere(256, 0, 8, 49, 4096));
  EXPECT_FALSE(on_ampere(256, 1, 1, 1'500'000'000, 64)) << "twice as many would not be an int";
  EXPECT_FALSE(on_ampere(64, 1, 1, 1'500'000'000, 64));
}

TEST(SelectBackward, OnHopperTheOnlyBlockOfKeysFormsTheWholeOfDq) {
  const DeviceInfo device = gpu(90, 227);
  const auto whole = [&](int head_dim, int seqlen_q, int seqlen_k, Band band, bool ragged = false) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen_k);
    problem.seqlen_q = seqlen_q;
    problem.band = band;
    problem.ragged = ragged;
    return dq_is_whole(select_backward(problem, device));
  };
  for (const int head_dim : {32, 64, 96, 128}) {
    EXPECT_TRUE(whole(head_dim, 5000, 77, Band::full()));
    EXPECT_TRUE(whole(head_dim, 1, 1, Band::full()));
    EXPECT_TRUE(whole(head_dim, 128, 128, Band::causal()));
    EXPECT_TRUE(whole(head_dim, 20, 128, Band::causal()));
    EXPECT_FALSE(whole(head_dim, 500, 129, Band::full())) << "blocks of keys are two";
    EXPECT_FALSE(whole(head_dim, 500, 60, Band::causal())) << "the first queries see no key";
    EXPECT_FALSE(whole(head_dim, 500, 0, Band::full())) << "no query sees a key";
    EXPECT_TRUE(whole(head_dim, 128, 128, {Band::kUnbounded, -1})) << "a tile's first query may see none";
    EXPECT_FALSE(whole(head_dim, 500, 100, {-50, 100})) << "the last queries see no key";
    EXPECT_FALSE(whole(head_dim, 100, 100, {Band::kUnbounded, -Band::kUnbounded})) << "no query sees a key";
    EXPECT_FALSE(whole(head_dim, 100, 100, Band::full(), true)) << "the host does not know the lengths";
  }
  EXPECT_FALSE(whole(256, 500, 100, Band::full())) << "dQ has a pass of its own";
}

TEST(SelectBackward, KeyBlocksOfOneWaveTakeTurnsUnderAMask) {
  const DeviceInfo device = gpu(90, 227);
  const auto plan = [&](int seqlen, Band band, int group = 1, bool deterministic = false) {
    Problem problem = problem_on(device, DType::kBFloat16, 128, 128, seqlen);
    problem.heads_q = 100;
    problem.heads_k = 100 / group;
    problem.band = band;
    problem.deterministic = deterministic;
    return select_backward(problem, device);
  };
  EXPECT_EQ(plan(8192, Band::causal()).heads_at_once, device.multiprocessors / 64);
  EXPECT_EQ(plan(1 << 20, Band::causal()).heads_at_once, 1);
  EXPECT_EQ(plan(8192, Band::full()).heads_at_once, 1);
  EXPECT_EQ(plan(0, Band::causal()).heads_at_once, 1);
  EXPECT_EQ(plan(8192, Band::causal(), 4).heads_at_once, device.multiprocessors * 4 / 64);
  EXPECT_LE(plan(8192, Band::causal(), 100).heads_at_once, 2);  // there are no more heads

  // In short heads, thread blocks take one block of keys after the other, under a mask those of whole heads at a time.
  EXPECT_EQ(plan(8192, Band::causal()).grid, plan(8192, Band::causal()).tiles);
  EXPECT_EQ(plan(2048, Band::full()).grid, device.multiprocessors);
  EXPECT_EQ(plan(2048, Band::full()).heads_at_once, 1);
  EXPECT_EQ(plan(2048, Band::causal()).grid, device.multiprocessors / 16 * 16);
  EXPECT_EQ(plan(2048, Band::causal()).heads_at_once, device.multiprocessors / 16);
  EXPECT_EQ(plan(2048, Band::causal(), 4).grid, plan(2048, Band::causal(), 4).tiles);  // each key meets 8192 queries
  EXPECT_EQ(plan(512, Band::full(), 1, true).grid, device.multiprocessors);            // also if deterministic,
  EXPECT_EQ(plan(2048, Band::full(), 1, true).grid, plan(2048, Band::full(), 1, true).tiles);  // but not long heads
  EXPECT_EQ(plan(0, Band::full(), 1, true).grid, 0);
  EXPECT_EQ(plan(27 * 128, Band::causal()).grid, plan(27 * 128, Band::causal()).tiles);  // 4 heads would leave 24 idle
  EXPECT_EQ(plan(0, Band::full()).grid, 0);
  // Full rounds of blocks are taken by a wave, unless a head's queries are more than the L2 cache keeps.
  const int full_round = 33 * 128;
  EXPECT_EQ(plan(8 * full_round, Band::full()).grid, device.multiprocessors);
  EXPECT_EQ(plan(16 * full_round, Band::full()).grid, plan(16 * full_round, Band::full()).tiles);
}

/// A last section of one head, beside others of five, left a fourth of the GPU idle.
TEST(SelectBackward, SectionsOfAWindowAreEqual) {
  DeviceInfo device = gpu(90, 227);
  device.l2_bytes = 50 << 20;
  for (int heads = 1; heads <= 64; ++heads) {
    Problem problem = problem_on(device, DType::kBFloat16, 128, 128, 8192);
    problem.batch = 1;
    problem.seqlen_k = 12288;
    problem.heads_k = heads;
    problem.heads_q = 4 * heads;
    problem.band = {4096, 0};
    const int at_once = select_backward(problem, device).heads_at_once, sections = (heads + at_once - 1) / at_once;
    EXPECT_LT(sections * at_once - heads, sections) << heads << " heads, " << at_once << " at once";
  }
}

TEST(SelectBackward, DeterministicKeyBlocksOfAHeadAreFewAtATime) {
  const DeviceInfo device = gpu(90, 227);
  const auto heads_at_once = [&](int head_dim, int seqlen) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen);
    problem.heads_q = problem.heads_k = 70;  // with a batch of 2, one round and a half of thread blocks
    problem.deterministic = true;
    return select_backward(problem, device).heads_at_once;
  };
  EXPECT_EQ(heads_at_once(128, 8192), device.multiprocessors / 8);
  EXPECT_EQ(heads_at_once(64, 8192), device.multiprocessors / 8);
  EXPECT_EQ(heads_at_once(64, 2048), device.multiprocessors / 4);
  EXPECT_EQ(heads_at_once(128, 512), device.multiprocessors / 2);
  EXPECT_EQ(heads_at_once(64, 512), device.multiprocessors);
  EXPECT_EQ(heads_at_once(128, 128), 140);  // there are no more heads
  EXPECT_EQ(heads_at_once(256, 512), 1);    // no block adds to dQ
}

TEST(SelectBackward, TakesTheTileThatWastesLess) {
  const DeviceInfo device = gpu(90, 227);
  const auto tile_m = [&](int seqlen, Band band, float softcap = 0) {
    Problem problem = problem_on(device, DType::kBFloat16, 128, 128, seqlen);
    problem.band = band;
    problem.softcap = softcap;
    return select_backward(problem, device).variant.tile_m;
  };
  EXPECT_EQ(tile_m(512, Band::full()), 64);  // tiles of 80 would go through 560 queries
  EXPECT_EQ(tile_m(640, Band::full()), 80);
  EXPECT_EQ(tile_m(2048, Band::full()), 80);
  EXPECT_EQ(tile_m(2048, Band::causal()), 64);
  EXPECT_EQ(tile_m(16384, Band::causal()), 80);
  EXPECT_EQ(tile_m(16384, Band::full(), 10), 64);
  EXPECT_EQ(tile_m(0, Band::full()), 64);
}

TEST(SelectBackward, OnHopperHasAKernelForNarrowerValues) {
  const DeviceInfo device = gpu(90, 227);
  const BackwardPlan plan = select_backward(problem_on(device, DType::kBFloat16, 192, 128, 300), device);
  EXPECT_EQ(name_of(plan.variant), "sm90_bf16_d192_v128_m128_n64_s2_w12");
}

TEST(SelectBackward, RefusesWhatItCannotCount) {
  const DeviceInfo device = gpu(90, 227);
  Problem problem = problem_on(device, DType::kFloat16, 64, 64, 0);
  const auto refusal_of_backward = [&](int seqlen_q, int seqlen_k) -> std::string {
    problem.seqlen_q = seqlen_q;
    problem.seqlen_k = seqlen_k;
    try {
      select_backward(problem, device);
    } catch (const Unsupported& error) {
      return error.what();
    }
    return "none";
  };
  problem.batch = 1 << 20;
  EXPECT_EQ(refusal_of_backward(100, 1 << 20).find("k has 17179869184 tiles"), 0u);
  EXPECT_EQ(refusal_of_backward(1 << 10, 100).find("q has 8589934592 rows"), 0u);
  EXPECT_EQ(refusal_of_backward(1 << 20, 100).find("q has 68719476736 tiles"), 0u);
  EXPECT_EQ(refusal_of_backward(100, 100), "none");
  problem.ragged = true;
  problem.batch = problem.heads_q = 1 << 29;  // whole blocks have 2^64 rows
  EXPECT_EQ(refusal_of_backward(1, 1).find("q has 288230376151711744 tiles"), 0u);
}

TEST(SelectBackward, RaggedSequencesUnderAShortWindowAreListedWhole) {
  const DeviceInfo device = gpu(90, 227);
  const auto plan = [&](int batch, Band band, int head_dim = 128, bool column_masked = false) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, 16384);
    problem.ragged = true;
    problem.batch = batch;
    problem.band = band;
    problem.masks_of_entry = problem.masked_entries = column_masked ? 1 : 0;
    return select_backward(problem, device);
  };
  const Band window = {4096, 0};
  EXPECT_EQ(plan(2, window).parts_of_sequence, 1);
  EXPECT_GT(plan(2, window).blocks_of_section, plan(2, Band::causal()).blocks_of_section);
  EXPECT_GT(plan(3, window).parts_of_sequence, 1) << "sequences are about as long as the window";
  EXPECT_GT(plan(1, Band::causal()).parts_of_sequence, 1);
  EXPECT_GT(plan(1, window, 128, true).parts_of_sequence, 1) << "what is hidden the host does not know";
  EXPECT_EQ(plan(3, window, 256).parts_of_sequence, 1) << "one of two passes fills the tail of the other";
}

TEST(SelectBackward, WorkspaceIsFourFloatsARowAndDqAndAnInt) {
  const DeviceInfo device = gpu(80, 163);
  Problem problem = problem_on(device, DType::kFloat16, 128, 128, 1024);
  problem.batch = 30;
  EXPECT_EQ(select_backward(problem, device).workspace_bytes, 4 * (128 + 4) * 30 * 8 * 1024 + 4);
}

TEST(SelectBackward, WhoAddsToATileOfDqMayNeedAnInt) {
  constexpr int kRows = 30 * 8 * 1024, kSteepMark = 4;
  const auto workspace = [](const DeviceInfo& device, int head_dim, bool deterministic) {
    Problem problem = problem_on(device, DType::kFloat16, head_dim, head_dim, 1024);
    problem.batch = 30;
    problem.deterministic = deterministic;
    return select_backward(problem, device).workspace_bytes;
  };
  const DeviceInfo ampere = gpu(80, 163), hopper = gpu(90, 227);
  EXPECT_EQ(workspace(ampere, 64, false), 4 * (64 + 4) * kRows + kSteepMark);
  EXPECT_EQ(workspace(ampere, 64, true),
            4 * (64 + 4) * kRows + kSteepMark + 16 * kRows / 32 + 4);  // an int a warp and tile of 32 rows
  EXPECT_EQ(workspace(hopper, 64, false), 4 * (64 + 4) * kRows + kSteepMark + 8 * kRows / 128 + 4);
  EXPECT_EQ(workspace(hopper, 64, true), workspace(hopper, 64, false));
  EXPECT_EQ(workspace(hopper, 256, true), 16 * kRows + kSteepMark + 4);  // a second pass forms dQ
}

DeviceInfo h100() {
  DeviceInfo device = gpu(90, 227);
  device.multiprocessors = 132;
  return device;
}

Problem of_heads(const DeviceInfo& device, int batch, int heads_q, int heads_k, int seqlen_q, int seqlen_k,
                 int head_dim = 128) {
  Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, 0);
  problem.batch = batch;
  problem.heads_q = heads_q;
  problem.heads_k = heads_k;
  problem.seqlen_q = seqlen_q;
  problem.seqlen_k = seqlen_k;
  return problem;
}

/// Tiles of dQ are cleared where they are few, or seen by more blocks of keys than run at a time.
TEST(SelectBackward, FirstBlockStoresDqOfTilesThatFewSee) {
  const DeviceInfo device = gpu(90, 227);
  Problem problem = problem_on(device, DType::kBFloat16, 64, 64, 32768);
  EXPECT_EQ(select_backward(problem, device).most_that_store, device.multiprocessors);
  EXPECT_EQ(select_backward(problem, gpu(80, 163)).most_that_store, -1);
  problem.deterministic = true;
  EXPECT_GT(select_backward(problem, device).most_that_store, problem.seqlen_k);
  problem.seqlen_q = 128;
  EXPECT_EQ(select_backward(problem, device).most_that_store, -1);
}

TEST(SelectBackward, TakesBandsThatLieElsewhere) {
  for (const DeviceInfo& device : {gpu(90, 227), gpu(80, 163), cpu()}) {
    for (const Band band : kBandsElsewhere) {
      for (const auto& [seqlen_q, seqlen_k] :
           {std::pair{1, 1}, std::pair{1, 5000}, std::pair{300, 4000}, std::pair{4000, 300}, std::pair{2048, 2048}}) {
        for (const int head_dim : {64, 128, 256}) {
          Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen_k);
          problem.seqlen_q = seqlen_q;
          problem.band = band;
          EXPECT_GE(backward_cost(problem).flops, 0);
          for (const bool ragged : {false, true}) {
            for (const bool deterministic : {false, true}) {
              problem.ragged = ragged, problem.deterministic = deterministic;
              const BackwardPlan plan = select_backward(problem, device);
              EXPECT_GE(plan.grid, 1);
              EXPECT_GE(plan.tiles, plan.grid);
              EXPECT_GE(plan.parts, 1);
              EXPECT_GE(plan.heads_at_once, 1);
            }
          }
        }
      }
    }
  }
}

TEST(SelectBackward, FewBlocksOfKeysHaveSeveralParts) {
  const DeviceInfo device = h100();
  const auto parts = [&](const Problem& problem) { return select_backward(problem, device).parts; };
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    const int least = head_dim <= 128 ? 3 : 2;  // one head has 17 or 33 blocks of keys
    for (const Band band : {Band::full(), Band::causal(), Band{500, 100}}) {
      Problem problem = of_heads(device, 1, 16, 1, 2080, 2080, head_dim);
      problem.band = band;
      EXPECT_GE(parts(problem), least) << head_dim;
      problem.deterministic = true;
      EXPECT_GE(parts(problem), least) << head_dim;
      problem.ragged = true;
      EXPECT_GE(parts(problem), least) << head_dim;
      problem.deterministic = problem.ragged = false;
      problem.batch = 64;
      EXPECT_EQ(parts(problem), 1) << head_dim;
    }
    EXPECT_GE(parts(of_heads(device, 1, 24, 24, 5584, 13, head_dim)), least);
    EXPECT_GE(parts(of_heads(device, 1, 1, 1, 5584, 200, head_dim)), 8);
  }
  // There are 140 blocks of keys, 8 more than multiprocessors; there are 132; and there is too little to share.
  EXPECT_GE(parts(of_heads(device, 1, 1, 1, 17920, 17920)), 2);
  EXPECT_EQ(parts(of_heads(device, 1, 1, 1, 132 * 128, 132 * 128)), 1);
  EXPECT_EQ(parts(of_heads(device, 1, 1, 1, 256, 256)), 1);
  EXPECT_EQ(parts(of_heads(device, 1, 0, 1, 2080, 2080)), 1);
  EXPECT_EQ(parts(of_heads(device, 1, 16, 1, 0, 2080)), 1);
  EXPECT_EQ(parts(of_heads(device, 1, 16, 1, 2080, 0)), 1);
  EXPECT_EQ(parts(of_heads(device, 0, 16, 1, 2080, 2080)), 1);
}

/// Returns when the last of `at_once` multiprocessors ends that take the blocks of keys of a causal problem in the
/// order of the plan, and when they would if all had equal work, in tiles of queries.
std::pair<double, double> ends_of(const BackwardPlan& plan, int at_once) {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const int blocks = Spans::tiles(p.seqlen_k, v.tile_n), heads = p.batch * p.heads_k;
  std::vector<double> busy(static_cast<std::size_t>(at_once));
  double sum = 0;
  for (int i = 0; i < heads * blocks; ++i) {
    const int first = BlockOfSection::at(unsigned(i), heads, blocks, plan.heads_at_once).rank * v.tile_n;
    const double steps = p.group() * (p.seqlen_q - first + v.tile_m - 1) / v.tile_m;
    for (int part = 0; part < plan.parts; ++part) *std::ranges::min_element(busy) += steps / plan.parts;
    sum += steps;
  }
  return {*std::ranges::max_element(busy), sum / at_once};
}

TEST(SelectBackward, FewBlocksUnderAMaskAreBalanced) {
  const DeviceInfo device = h100();
  for (Problem problem : {of_heads(device, 5, 42, 6, 1106, 1106, 104), of_heads(device, 4, 4, 4, 4466, 4466),
                          of_heads(device, 3, 2, 2, 6048, 6048, 64), of_heads(device, 22, 7, 1, 1232, 1232, 64),
                          of_heads(device, 1, 26, 13, 5521, 5521, 88), of_heads(device, 1, 9, 9, 4448, 4448, 104)}) {
    SCOPED_TRACE(to_string(problem));
    problem.band = Band::causal();
    const auto [end, equal] = ends_of(select_backward(problem, device), device.multiprocessors);
    EXPECT_LE(end, 1.2 * equal);
  }
}

TEST(SelectBackward, SectionsFitTheL2Cache) {
  const DeviceInfo device = h100();
  for (const int heads_k : {8, 16, 64}) {
    for (const int batch : {4, 8, 16}) {
      Problem problem = of_heads(device, batch, 64, heads_k, 2048, 2048);
      problem.band = Band::causal();
      const BackwardPlan plan = select_backward(problem, device);
      // Sections are equally large, so one may be half as large again as what fits.
      EXPECT_LE(plan.heads_at_once * 2048 * 128 * (2 + 2 + 4), 1.5 * static_cast<double>(device.l2_bytes))
          << batch << " × " << heads_k;
    }
  }
}

TEST(SelectBackward, ManyShortBlocksUnderAMaskAreTakenByAWave) {
  const DeviceInfo device = h100();
  Problem problem = of_heads(device, 1, 44, 44, 43, 4450, 88);  // 35 blocks of keys, which do not divide a wave
  problem.band = Band::causal();
  EXPECT_EQ(select_backward(problem, device).grid, device.multiprocessors);
  const auto in_rounds = [&](const BackwardPlan& plan, int blocks) {
    return go_in_rounds(plan.problem, plan.variant, blocks, plan.parts, plan.grid);
  };
  EXPECT_FALSE(in_rounds(select_backward(problem, device), 35));
  problem.seqlen_k = 12 * 128;
  EXPECT_TRUE(in_rounds(select_backward(problem, device), 12)) << "eleven heads make a wave";
  problem.dropout = Dropout::of(0.1, 0);
  EXPECT_FALSE(in_rounds(select_backward(problem, device), 12)) << "no kernel with dropout does";
}

TEST(SelectBackward, VeryManyQueriesAreNotCountedOneByOne) {
  const DeviceInfo device = h100();
  for (const int head_dim : {64, 128, 256}) {
    for (const Band band : {Band::full(), Band::causal()}) {
      Problem problem = of_heads(device, 1, 8, 8, (1 << 27) - 1, 13, head_dim);
      problem.band = band;
      const auto expect_parts = [&] {
        const int parts = select_backward(problem, device).parts;
        EXPECT_TRUE(band == Band::full() ? parts >= 8 : parts == 1)  // the last 13 queries alone see a key
            << head_dim << ": " << parts;
      };
      expect_parts();
      problem.ragged = true;
      expect_parts();
    }
  }
}

TEST(SelectBackward, OfTwoPassesTheLongerPiecesComeFirst) {
  const DeviceInfo device = h100();
  const auto first = [&](int heads_q, int seqlen_q, int seqlen_k) {
    const Problem problem = of_heads(device, 1, heads_q, 2, seqlen_q, seqlen_k, 192);
    return queries_come_first(problem, select_backward(problem, device).variant, 1);
  };
  EXPECT_TRUE(first(2, 3312, 3312)) << "a tile has twice the rows of a block";
  EXPECT_TRUE(first(8, 96, 7000));
  EXPECT_FALSE(first(8, 3312, 3312)) << "a block of keys meets the queries of four heads";
}

TEST(SelectBackward, NoPartOutlastsAnEvenShareOfTwoPasses) {
  constexpr double kEnds = 2;  // steps that a thread block takes before and after those of a piece of work
  const DeviceInfo device = h100();
  for (const int head_dim : {192, 256}) {
    for (const Problem& p :
         {of_heads(device, 1, 16, 1, 2080, 2080, head_dim), of_heads(device, 1, 24, 24, 5584, 13, head_dim),
          of_heads(device, 1, 32, 2, 1500, 900, head_dim)}) {
      SCOPED_TRACE(to_string(p));
      const BackwardPlan plan = select_backward(p, device);
      const Variant& v = plan.variant;
      const int key_blocks = Spans::tiles(p.seqlen_k, v.tile_n);
      const double steps = 1.0 * p.group() * Spans::tiles(p.seqlen_q, kQueriesOfPass);  // of a block of keys
      const double of_keys = p.heads_k * key_blocks * (steps + kEnds);
      const double of_queries =
          p.heads_q * Spans::tiles(p.seqlen_q, v.tile_m) * (key_blocks * step_of_queries(v) + kEnds);
      EXPECT_LE(steps / plan.parts + kEnds, 1.2 * (of_keys + of_queries) / device.multiprocessors);
    }
  }
}

TEST(SelectBackward, PartsAreWorkItemsAndTakeABoundedWorkspace) {
  for (const DeviceInfo& device : {h100(), gpu(80, 163)}) {
    for (const int head_dim : {64, 96, 128, 192, 256}) {
      for (const int seqlen_k : {1, 13, 200, 2080, 9000, 17920, 40000}) {
        for (const int heads_k : {1, 2, 8}) {
          for (const bool ragged : {false, true}) {
            Problem problem = of_heads(device, 1, 16, heads_k, 5584, seqlen_k, head_dim);
            problem.ragged = ragged;
            const BackwardPlan plan = select_backward(problem, device);
            const BackwardWorkspace without = BackwardWorkspace::of(problem, plan.variant, 1);
            const std::int64_t partial = plan.workspace_bytes - without.bytes();
            const std::int64_t tiles = plan.tiles - (plan.variant.two_passes() ? without.tiles : 0);
            EXPECT_EQ(tiles, plan.parts * heads_k * problem.places_k(plan.variant.tile_n));
            if (plan.parts == 1) {
              EXPECT_EQ(partial, 0);
              continue;
            }
            const std::int64_t exact = 4 * tiles * plan.variant.tile_n * 2 * head_dim;
            EXPECT_TRUE(exact <= partial && partial < exact + 16);
            EXPECT_LE(partial, 300 << 20);
            EXPECT_NE(to_string(plan).find(std::to_string(plan.parts) + " thread blocks share"), std::string::npos);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
