// These tests check plans of the forward: how many thread blocks, who takes which tile, and which heads share one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "flashtile/flashtile.h"
#include "flashtile/registry.h"
#include "flashtile/scheduler/persistent.h"
#include "flashtile/scheduler/ragged.h"
#include "problems.h"

namespace flashtile {
namespace {

TEST(SelectForward, GridHasATilePerBlockOfRows) {
  const DeviceInfo device = gpu(80, 163);
  const ForwardPlan plan = select_forward(problem_on(device, DType::kFloat16, 64, 64, 1000), device);
  const int blocks = (1000 + plan.variant.tile_m - 1) / plan.variant.tile_m;
  EXPECT_EQ(plan.tiles, 2 * 8 * blocks);
  EXPECT_EQ(plan.grid, plan.tiles);
}

TEST(SelectForward, HopperHasOneBlockPerMultiprocessor) {
  const DeviceInfo device = gpu(90, 227);
  for (const int seqlen : {129, 1000, 50000}) {
    const ForwardPlan plan = select_forward(problem_on(device, DType::kFloat16, 64, 64, seqlen), device);
    EXPECT_EQ(plan.variant.arch, Arch::kSm90);
    const int queries = plan.packing.queries_of(plan.variant.tile_m), packs = 8 / plan.packing.heads;
    EXPECT_EQ(plan.tiles, 2 * packs * ((seqlen + queries - 1) / queries) * plan.splits);
    EXPECT_EQ(plan.grid, std::min<std::int64_t>(plan.tiles, device.multiprocessors));
  }
}

/// Returns the work of the busiest thread block over the mean, where a tile's work is its key blocks and one more.
double unevenness(const ForwardPlan& plan) {
  const Problem& p = plan.problem;
  const PersistentScheduler& scheduler = *plan.scheduler;
  double sum = 0, most = 0;
  for (int block = 0; block < plan.grid; ++block) {
    double busy = 0;
    for (int n = 0; n < scheduler.tiles_of(block); ++n) {
      const int first_row = scheduler.tile(scheduler.index(n, block)).m_block * plan.variant.tile_m;
      const Range queries = plan.packing.queries(first_row, plan.variant.tile_m, p.seqlen_q);
      busy += 1 + p.mask().walk(queries, plan.variant.tile_n, p.lengths()).blocks();
    }
    sum += busy;
    most = std::max(most, busy);
  }
  return most * plan.grid / sum;
}

TEST(SelectForward, HopperDividesCausalWorkEvenly) {
  for (const int multiprocessors : {114, 132, 144}) {
    DeviceInfo device = gpu(90, 227);
    device.multiprocessors = multiprocessors;
    for (const int head_dim : {64, 128, 256}) {
      for (int seqlen = 512; seqlen <= 16384; seqlen *= 2) {
        Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen);
        problem.batch = 16384 / seqlen;
        problem.heads_q = problem.heads_k = 2048 / head_dim;
        problem.band = Band::causal();
        const ForwardPlan plan = select_forward(problem, device);
        // Tiles are not divided, so where each block has few of them, some blocks have one more than the mean.
        const double rounds = static_cast<double>(plan.tiles) / plan.grid;
        EXPECT_LE(unevenness(plan), std::max(1.035, std::ceil(rounds) / rounds)) << to_string(plan);
        EXPECT_EQ(select_forward(problem, device).scheduler, plan.scheduler);
      }
    }
  }
}

TEST(SelectForward, HopperKeepsTilesOfAHeadTogether) {
  // As many heads as L2 has room for were taken once, or of more than 4,096 tiles those of four waves: up to 1.4 times
  // as long, since thread blocks then had long tiles all at once, and after that short ones, which load the most.
  const DeviceInfo device = gpu(90, 227);
  for (const int head_dim : {64, 128, 256}) {
    for (const int seqlen : {384, 512, 1024, 2000}) {
      for (const int batch : {16, 100, 400}) {
        Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen);
        problem.batch = batch;
        problem.heads_q = problem.heads_k = 16;
        problem.band = Band::causal();
        const ForwardPlan plan = select_forward(problem, device);
        EXPECT_LE(plan.scheduler->heads_at_once, 8) << to_string(plan);
        const double rounds = static_cast<double>(plan.tiles) / plan.grid;
        EXPECT_LE(unevenness(plan), std::max(1.07, std::ceil(rounds) / rounds)) << to_string(plan);
      }
    }
  }
}

TEST(SelectForward, HopperSplitsKeysWhereTilesAreFew) {
  const DeviceInfo device = gpu(90, 227);
  const auto plan_of = [&](int batch, int heads_q, int heads_k, int seqlen_q, int seqlen_k, Band band, bool sinks,
                           bool max_logits = false) {
    Problem problem = problem_on(device, DType::kBFloat16, 128, 128, seqlen_k);
    problem.batch = batch, problem.seqlen_q = seqlen_q, problem.heads_q = heads_q, problem.heads_k = heads_k;
    problem.band = band;
    problem.sinks = sinks;
    problem.max_logits = max_logits;
    return select_forward(problem, device);
  };
  for (const Band band : {Band::full(), Band::causal()}) {
    for (const bool sinks : {false, true}) {
      for (const bool max_logits : {false, true}) {
        EXPECT_GT(plan_of(2, 8, 2, 25, 11262, band, sinks, max_logits).splits, 8);
        EXPECT_GT(plan_of(1, 32, 8, 180, 6752, band, sinks, max_logits).splits, 1);
        EXPECT_EQ(plan_of(4, 32, 8, 4096, 4096, band, sinks, max_logits).splits, 1) << "there are tiles enough";
        EXPECT_EQ(plan_of(1, 1, 1, 100, 100, band, sinks, max_logits).splits, 1) << "there are few keys";
      }
    }
  }
  // These 22 tiles are about equally long, so one split more would be a second round for some.
  const ForwardPlan alike = plan_of(1, 1, 1, 2813, 9479, Band::causal(), false);
  EXPECT_LE(alike.tiles, device.multiprocessors);
  EXPECT_GT(alike.tiles + 22, device.multiprocessors);
  // One round of smaller tiles is faster than one of larger tiles that leave a third of the multiprocessors idle.
  EXPECT_EQ(plan_of(1, 1, 1, 12000, 12000, Band::full(), false).variant.tile_m, 128);

  const ForwardPlan plan = plan_of(2, 8, 2, 200, 9000, Band::causal(), false);
  const PersistentScheduler& scheduler = *plan.scheduler;
  EXPECT_EQ(scheduler.tiles(), plan.tiles);
  EXPECT_EQ(plan.grid, std::min<std::int64_t>(plan.tiles, device.multiprocessors));
  std::set<std::tuple<int, int, int>> taken;  // (batch, head, block of rows and split)
  for (int block = 0; block < plan.grid; ++block) {
    for (int n = 0; n < scheduler.tiles_of(block); ++n) {
      const TileCoord tile = scheduler.tile(scheduler.index(n, block));
      EXPECT_LT(tile.m_block, plan.m_blocks * plan.splits);
      EXPECT_TRUE(taken.emplace(tile.batch, tile.head, tile.m_block).second);
    }
  }
  EXPECT_EQ(taken.size(), static_cast<std::size_t>(plan.tiles));
  const std::int64_t rows = plan.tiles * plan.variant.tile_m;
  EXPECT_EQ(plan.workspace_bytes, plan.parts_at + rows * (128 + 2) * 4);
  EXPECT_EQ(plan.parts_at % 16, 0);
}

TEST(SelectForward, FewKeysTakeAmperesRowsOnHopper) {
  DeviceInfo device = gpu(90, 227);
  device.multiprocessors = 132;
  const auto arch_of = [&](int batch, int heads, int head_dim, int seqlen_q, int seqlen_k, bool ragged = false) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen_k);
    problem.batch = batch, problem.heads_q = problem.heads_k = heads, problem.seqlen_q = seqlen_q;
    problem.ragged = ragged;
    return select_forward(problem, device).variant.arch;
  };
  EXPECT_EQ(arch_of(1, 2, 104, 1504, 24), Arch::kSm80);
  EXPECT_EQ(arch_of(2, 16, 128, 1024, 64), Arch::kSm80);
  EXPECT_EQ(arch_of(1, 6, 64, 5000, 6), Arch::kSm80) << "two thread blocks share a multiprocessor";
  EXPECT_EQ(arch_of(1, 6, 128, 5000, 6), Arch::kSm80) << "Hopper's tiles are more than a wave";
  EXPECT_EQ(arch_of(1, 12, 128, 1594, 5), Arch::kSm90) << "Hopper's tiles are one wave";
  EXPECT_EQ(arch_of(1, 8, 64, 128, 65), Arch::kSm90) << "two blocks of keys";
  EXPECT_EQ(arch_of(8, 14, 64, 768, 15), Arch::kSm90) << "a multiprocessor has more than two tiles";
  EXPECT_EQ(arch_of(4, 8, 64, 4096, 77), Arch::kSm90) << "there are eight waves of tiles";
  EXPECT_EQ(arch_of(1, 8, 64, 256, 256), Arch::kSm90);
  EXPECT_EQ(arch_of(1, 8, 160, 128, 128), Arch::kSm90) << "Ampere's tiles of so wide a head have half the rows";
  EXPECT_EQ(arch_of(1, 8, 64, 128, 128, true), Arch::kSm90) << "how long a sequence is, select does not know";
}

TEST(SelectForward, RowsOfD128ServeNarrowerHeadsWhereTheyAreFaster) {
  const DeviceInfo device = gpu(90, 227);
  const auto row_of = [&](int batch, int head_dim, int seqlen_q, int seqlen_k) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen_k);
    problem.batch = batch, problem.heads_q = problem.heads_k = 16, problem.seqlen_q = seqlen_q;
    return select_forward(problem, device).variant.head_dim;
  };
  EXPECT_EQ(row_of(4, 72, 1024, 1024), 128);
  EXPECT_EQ(row_of(4, 88, 1024, 1024), 96) << "its rows take three boxes, or two of twice the size";
  EXPECT_EQ(row_of(1, 72, 1024, 1024), 96) << "there are fewer tiles than multiprocessors";
  EXPECT_EQ(row_of(8, 88, 1024, 16), 128) << "all keys are in one tile";
  EXPECT_EQ(row_of(8, 96, 1024, 16), 96);
  EXPECT_EQ(row_of(8, 64, 1024, 16), 64);
}

TEST(SelectForward, FewKeysTakeTallTiles) {
  const DeviceInfo device = gpu(90, 227);
  for (const int head_dim : {64, 96, 128}) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, 16);
    problem.batch = 2, problem.heads_q = problem.heads_k = 20, problem.seqlen_q = 3000;
    EXPECT_EQ(select_forward(problem, device).variant.tile_m, 192) << head_dim;
    EXPECT_EQ(select_forward(problem, device).variant.arch, Arch::kSm90) << head_dim;
  }
}

TEST(SelectForward, RowsThatBeginWithinSectorsTakeTallTiles) {
  const DeviceInfo device = gpu(90, 227);
  for (const int head_dim : {88, 104}) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, 7392);
    problem.batch = 1, problem.heads_q = problem.heads_k = 8;
    EXPECT_EQ(select_forward(problem, device).variant.tile_m, 192) << head_dim;
  }
}

TEST(SelectForward, NarrowWindowsPackHeads) {
  const DeviceInfo device = gpu(90, 227);
  Problem problem = problem_on(device, DType::kBFloat16, 64, 64, 8192);
  problem.heads_q = 64, problem.heads_k = 8;
  for (const bool sinks : {true, false}) {
    problem.band = {127, 0};
    problem.sinks = sinks;
    const ForwardPlan plan = select_forward(problem, device);
    EXPECT_EQ(plan.packing.heads, 8);
    const int keys = 127 + plan.packing.queries_of(plan.variant.tile_m);
    EXPECT_LE(keys, 2 * plan.variant.tile_n) << "all keys that a tile sees are in two blocks";
    EXPECT_GT(1.1 * keys, 2 * plan.variant.tile_n) << "and these hold little else";
    EXPECT_EQ(plan.variant.features, Features::kSinks);
  }
  problem.band = Band::causal();
  EXPECT_EQ(select_forward(problem, device).variant.features, Features::kNone);
}

/// They cost little, so no head dimension takes rows of a wider one for them.
TEST(SelectForward, SinksTakeRowsOfTheHeadsWidth) {
  const DeviceInfo device = gpu(90, 227);
  for (const auto& [head_dim, head_dim_v] :
       {std::pair{64, 64}, std::pair{88, 88}, std::pair{96, 96}, std::pair{128, 128}, std::pair{192, 128},
        std::pair{192, 192}, std::pair{256, 256}}) {
    for (const int seqlen : {150, 600, 4096}) {
      Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim_v, seqlen);
      const Variant plain = select_forward(problem, device).variant;
      problem.sinks = true;
      const Variant sinks = select_forward(problem, device).variant;
      EXPECT_EQ(sinks.head_dim, plain.head_dim) << head_dim << ", " << seqlen;
      EXPECT_EQ(sinks.head_dim_v, plain.head_dim_v) << head_dim_v << ", " << seqlen;
    }
  }
}

TEST(SelectForward, TakesBandsThatLieElsewhere) {
  for (const DeviceInfo& device : {gpu(90, 227), gpu(80, 163), cpu()}) {
    for (const Band band : kBandsElsewhere) {
      for (const auto& [seqlen_q, seqlen_k] :
           {std::pair{1, 1}, std::pair{1, 5000}, std::pair{300, 4000}, std::pair{4000, 300}, std::pair{4096, 4096}}) {
        for (const int head_dim : {64, 128, 256}) {
          Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, seqlen_k);
          problem.seqlen_q = seqlen_q;
          problem.band = band;
          EXPECT_GE(forward_cost(problem).flops, 0);
          for (const bool ragged : {false, true}) {
            problem.ragged = ragged;
            const ForwardPlan plan = select_forward(problem, device);
            EXPECT_GE(plan.grid, 1);
            EXPECT_GE(plan.splits, 1);
            if (!plan.scheduler) continue;
            EXPECT_EQ(plan.scheduler->tiles(), plan.tiles);
            EXPECT_GE(unevenness(plan), 1 - 1e-9);
          }
        }
      }
    }
  }
}

TEST(SelectForward, FewKeysTakeNarrowBlocks) {
  const DeviceInfo device = gpu(90, 227);
  const auto tile_n_of = [&](int seqlen_k) {
    Problem problem = problem_on(device, DType::kBFloat16, 64, 64, seqlen_k);
    problem.batch = 8, problem.heads_q = problem.heads_k = 10, problem.seqlen_q = 4096;
    return select_forward(problem, device).variant.tile_n;
  };
  EXPECT_EQ(tile_n_of(77), 80);
  EXPECT_EQ(tile_n_of(16), 80);
  EXPECT_EQ(tile_n_of(128), 128) << "two blocks of 80 keys hold more than one of 128";
  EXPECT_EQ(tile_n_of(4096), 128) << "in the steady state the wider block is faster";
}

TEST(SelectForward, HopperPlansEmptyProblems) {
  const DeviceInfo device = gpu(90, 227);
  for (const Band band : {Band::full(), Band::causal()}) {
    for (const auto& [batch, seqlen_q] : {std::pair{0, 100}, std::pair{2, 0}}) {
      Problem problem = problem_on(device, DType::kBFloat16, 128, 128, 200);
      problem.batch = batch;
      problem.seqlen_q = seqlen_q;
      problem.band = band;
      const ForwardPlan plan = select_forward(problem, device);
      EXPECT_EQ(plan.grid, 0);
      EXPECT_EQ(plan.scheduler->tiles(), 0u);
    }
  }
}

TEST(SelectForward, HopperScheduleDependsOnTheProblemAlone) {
  // These two problems have the same tiles, but keys of other sizes: the second must not get what was found for the
  // first.
  const DeviceInfo device = gpu(90, 227);
  const auto heads_at_once = [&](int head_dim_v) {
    Problem problem = problem_on(device, DType::kFloat16, 192, head_dim_v, 2304);
    problem.batch = 2;
    problem.heads_q = problem.heads_k = 10;
    problem.band = Band::causal();
    return select_forward(problem, device).scheduler->heads_at_once;
  };
  std::set<int> narrow, wide;
  std::thread([&] { narrow.insert(heads_at_once(128)), wide.insert(heads_at_once(192)); }).join();
  std::thread([&] { wide.insert(heads_at_once(192)), narrow.insert(heads_at_once(128)); }).join();
  EXPECT_EQ(narrow.size(), 1u);
  EXPECT_EQ(wide.size(), 1u);
  EXPECT_NE(narrow, wide);  // else this test would say nothing
}

TEST(SelectForward, HopperPacksHeadsWhereThatSavesKeysOrRows) {
  const DeviceInfo device = gpu(90, 227);
  // Of a group so many heads share a tile where queries are many, and where there is one.
  // Packs share heads where these are a group of 37.
  const std::tuple<int, int, int> groups[] = {{1, 1, 1},    {2, 2, 2},   {3, 1, 3},    {4, 4, 4},
                                              {6, 2, 6},    {7, 1, 7},   {8, 8, 8},    {12, 4, 12},
                                              {16, 16, 16}, {20, 4, 10}, {32, 16, 16}, {37, 1, 13}};
  for (const auto& [group, of_many, of_one] : groups) {
    Problem problem = problem_on(device, DType::kBFloat16, 128, 128, 6144);  // whole tiles of 128 and of 192 rows
    problem.heads_q = group * problem.heads_k;
    EXPECT_EQ(select_forward(problem, device).packing.heads, 1) << "all tiles are whole, and see all keys";
    problem.band = Band::causal();
    const ForwardPlan causal = select_forward(problem, device);
    EXPECT_EQ(causal.packing.heads, of_many) << group;
    EXPECT_EQ(problem.heads_q % causal.packing.heads, 0);
    problem.alibi = true;
    EXPECT_EQ(select_forward(problem, device).packing.heads, 1) << "a tile has one slope";
    problem.alibi = false;
    problem.band = Band::full();
    problem.seqlen_q = 1;
    EXPECT_EQ(select_forward(problem, device).packing.heads, of_one) << group;
    problem.seqlen_q = (1 << 30) - 1;
    problem.batch = 1;
    problem.band = Band::causal();
    EXPECT_EQ(select_forward(problem, device).packing.heads, 1) << "int counts the rows";
    EXPECT_EQ(select_forward(problem, gpu(80, 163)).packing.heads, 1);
  }
}

TEST(SelectForward, PacksShareHeadsWhereNoPackDividesAGroup) {
  const DeviceInfo device = gpu(90, 227);
  Problem problem = problem_on(device, DType::kBFloat16, 256, 256, 141);
  problem.batch = 64, problem.heads_q = 37, problem.heads_k = 1, problem.band = Band::causal();
  const ForwardPlan plan = select_forward(problem, device);
  EXPECT_EQ(plan.packing.heads, 8);
  EXPECT_EQ(plan.packing.packs_of(37), 5);
  EXPECT_EQ(plan.tiles, 64 * 5 * 9) << "a tile has 16 queries";
  problem.softcap = 30;
  EXPECT_EQ(select_forward(problem, device).packing.heads, 1) << "two packs might store different bits";
  problem.softcap = 0, problem.scale = -1;
  EXPECT_EQ(select_forward(problem, device).packing.heads, 1) << "a negative scale maps scores, too";
  problem.scale = 1, problem.heads_q = 36;
  EXPECT_EQ(select_forward(problem, device).packing.packs_of(36) * select_forward(problem, device).packing.heads, 36)
      << "no head is computed twice where that saves no tile";
}

TEST(SelectForward, AmperesBlocksHaveTwiceTheWarpsWhereEachIsAloneOnAMultiprocessor) {
  for (const DeviceInfo& device : {gpu(80, 163), gpu(90, 227)}) {
    Problem problem = problem_on(device, DType::kBFloat16, 64, 64, 19);
    problem.batch = problem.heads_q = problem.heads_k = 1, problem.seqlen_q = 2736;
    const ForwardPlan alone = select_forward(problem, device);
    ASSERT_EQ(alone.variant.arch, Arch::kSm80);
    EXPECT_EQ(alone.threads(), 2 * alone.variant.threads());
    problem.seqlen_q = 128 * device.multiprocessors + 1;
    EXPECT_EQ(select_forward(problem, device).threads(), alone.variant.threads()) << "one has a second tile";
    problem.seqlen_q = 2736, problem.dropout = Dropout::of(0.1, 0);
    EXPECT_EQ(select_forward(problem, device).threads(), alone.variant.threads())
        << "rows with features have no such kernel";
  }
}

TEST(SelectForward, ValuesNarrowerThanKeysHaveARow) {
  const DeviceInfo device = gpu(90, 227);
  const auto row_for = [&](int d, int d_v) {
    const Variant v = select_forward(problem_on(device, DType::kBFloat16, d, d_v, 1000), device).variant;
    return std::pair(v.head_dim, v.head_dim_v);
  };
  EXPECT_EQ(row_for(192, 128), std::pair(192, 128));
  EXPECT_EQ(row_for(136, 8), std::pair(192, 128));
  EXPECT_EQ(row_for(192, 136), std::pair(192, 192));
  EXPECT_EQ(row_for(128, 136), std::pair(192, 192));
  EXPECT_EQ(row_for(200, 64), std::pair(256, 256));
}

TEST(SelectForward, PartsOfRaggedSequencesCanBeCounted) {
  for (const DeviceInfo& device : {gpu(80, 163), gpu(90, 227)})
    for (const int batch : {1 << 28, 1 << 29}) {
      Problem p = problem_on(device, DType::kFloat16, 64, 64, 1000);
      p.ragged = true;
      p.batch = batch;
      p.heads_q = p.heads_k = 1;
      p.band = Band::causal();
      EXPECT_LE(std::int64_t{batch} * select_forward(p, device).parts_of_sequence, std::numeric_limits<int>::max());
      EXPECT_THROW(select_backward(p, device), Unsupported);  // each sequence has a tile of rows
    }
}

TEST(SelectForward, SectionsOfRaggedBatchesAreCountedWhateverTheGroup) {
  for (const bool hopper : {false, true}) {
    DeviceInfo device = hopper ? gpu(90, 227) : gpu(80, 163);
    device.multiprocessors = 132;
    Problem problem = problem_on(device, DType::kFloat16, 256, 256, 1);
    problem.ragged = true;
    problem.band = Band::causal();
    problem.batch = problem.heads_k = 1;
    for (const int heads : {1, 1 << 10, (1 << 24) - 1}) {
      problem.heads_q = heads;
      const int forward = select_forward(problem, device).blocks_of_section;
      const int backward = select_backward(problem, device).blocks_of_section;
      const bool many = hopper && heads > 1 << 10;  // with many tiles for each thread block, heads need no section
      if (many)
        EXPECT_EQ(forward, 0);
      else
        EXPECT_GT(forward, 0);
      EXPECT_GT(backward, 0);
      EXPECT_LE(std::max(forward, backward), 1 << 30);  // so that an int counts the heads as well
    }
  }
}

TEST(SelectForward, HeadComesAfterHeadWhereThreadBlocksTakeManyTiles) {
  DeviceInfo device = gpu(90, 227);
  device.multiprocessors = 132;
  const auto blocks_of_section = [&](int heads, Band band) {
    Problem problem = problem_on(device, DType::kFloat16, 128, 128, 16384);
    problem.ragged = true;
    problem.band = band;
    problem.batch = 2;
    problem.heads_q = problem.heads_k = heads;
    return select_forward(problem, device).blocks_of_section;
  };
  EXPECT_GE(blocks_of_section(4, Band::causal()), 2 * 128);  // two heads of one long sequence are interleaved
  EXPECT_EQ(blocks_of_section(16, Band::causal()), 0);
  EXPECT_EQ(blocks_of_section(4, Band::full()), 0);
}

TEST(SelectForward, OnHopperFewSequencesNeedNoList) {
  const auto lists = [](int sm, int batch, int rows, int heads) {
    Problem problem = problem_on(gpu(sm, sm == 90 ? 227 : 163), DType::kFloat16, 128, 128, rows);
    problem.ragged = true;
    problem.batch = batch;
    problem.heads_q = problem.heads_k = heads;
    const ForwardPlan plan = select_forward(problem, gpu(sm, sm == 90 ? 227 : 163));
    // A list has an entry for each slot; without a list there is only the count of tiles that are taken.
    EXPECT_EQ(plan.workspace_bytes, plan.lists ? RaggedTiles::bytes(plan.m_blocks) : 8);
    return plan.lists;
  };
  EXPECT_FALSE(lists(90, 0, 100, 4));
  EXPECT_FALSE(lists(90, 1, 0, 4));
  EXPECT_FALSE(lists(90, 32, 100'000, 4));
  EXPECT_TRUE(lists(90, 33, 100'000, 4));
  EXPECT_TRUE(lists(80, 32, 100'000, 4));
  EXPECT_FALSE(lists(90, 1, 128 * 65'000, 1));  // slots are numbered in 16 bits
  EXPECT_TRUE(lists(90, 1, 192 * 66'000, 1));
  EXPECT_FALSE(lists(90, 1, 128 * 1'000, 1'000));  // and the count of tiles has 20 bits
  EXPECT_TRUE(lists(90, 1, 192 * 1'100, 1'000));
}

TEST(SelectForward, SectionsFitTheL2Cache) {
  const auto blocks_of_section = [](int l2_mib) {
    DeviceInfo device = gpu(80, 163);
    device.l2_bytes = std::int64_t{l2_mib} << 20;
    Problem problem = problem_on(device, DType::kFloat16, 128, 128, 16384);
    problem.ragged = true;
    problem.band = Band::causal();
    problem.batch = 2;
    problem.heads_q = problem.heads_k = 4;
    return select_forward(problem, device).blocks_of_section;
  };
  const int key_bytes_of_block = 128 * (128 + 128) * 2;  // keys and values of as many keys as a block has rows
  EXPECT_LE(std::int64_t{blocks_of_section(6)} * key_bytes_of_block, 6 << 20);
  EXPECT_GT(blocks_of_section(6), 0);
  EXPECT_LT(blocks_of_section(6), blocks_of_section(50));
  EXPECT_EQ(blocks_of_section(50), blocks_of_section(60));  // what was fitted on a GPU with 50 MiB
}

}  // namespace
}  // namespace flashtile
