// These tests check plans of problems with a column mask: which kernel takes them, what they need beside, and who is
// refused.
#include <gtest/gtest.h>

#include <string>

#include "flashtile/error.h"
#include "flashtile/flashtile.h"
#include "flashtile/mask_words.h"
#include "flashtile/workspace.h"
#include "problems.h"

namespace flashtile {
namespace {

Problem masked(const DeviceInfo& device, int head_dim, int head_dim_v, int seqlen = 4096) {
  Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim_v, seqlen);
  problem.masks_of_entry = 2;
  problem.masked_entries = 1;
  return problem;
}

template <class Plan>
std::string refusal(Plan&& plan) {
  try {
    plan();
  } catch (const Unsupported& error) {
    return error.what();
  }
  return "accepted";
}

TEST(SelectMasked, ForwardsTakeRowsThatMayMask) {
  const DeviceInfo device = gpu(90, 227);
  for (int d = 8; d <= 256; d += 8)
    for (const bool ragged : {false, true}) {
      Problem problem = masked(device, d, d);
      problem.ragged = ragged;
      problem.max_logits = true;
      const ForwardPlan with_largest = select_forward(problem, device);
      EXPECT_TRUE(with_largest.variant.may_mask() && with_largest.variant.knows(Features::kMaxLogits));
      problem.max_logits = false;
      const ForwardPlan plan = select_forward(problem, device);
      EXPECT_TRUE(plan.variant.may_mask());
      EXPECT_EQ(with_largest.variant.tile_m, plan.variant.tile_m);
      EXPECT_EQ(plan.variant.head_dim, d <= 64 ? 64 : d <= 128 ? 128 : 256);
      EXPECT_EQ(plan.packed_heads, 1);
      EXPECT_EQ(plan.splits, 1);
      EXPECT_EQ(plan.grid, device.multiprocessors);
    }
  EXPECT_EQ(select_forward(masked(device, 192, 128), device).variant.head_dim, 192);
}

TEST(SelectMasked, TakesBandsThatLieElsewhere) {
  for (const DeviceInfo& device : {gpu(90, 227), gpu(80, 163)}) {
    for (const Band band : kBandsElsewhere) {
      for (const bool ragged : {false, true}) {
        Problem problem = masked(device, 128, 128);
        problem.band = band, problem.ragged = ragged;
        EXPECT_GE(select_forward(problem, device).grid, 1);
        for (const bool deterministic : {false, true}) {
          problem.deterministic = deterministic;
          EXPECT_GE(select_backward(problem, device).grid, 1);
        }
      }
    }
  }
}

TEST(SelectMasked, MappedScoresAndSinksTakeRowsThatKnowMore) {
  const DeviceInfo device = gpu(90, 227);
  for (const int d : {64, 128, 192, 256}) {
    for (const int option : {0, 1, 2, 3}) {
      Problem problem = masked(device, d, d);
      if (option == 0) problem.softcap = 20;
      if (option == 1) problem.alibi = true;
      if (option == 2) problem.sinks = true;
      if (option == 3) problem.dropout = Dropout::of(0.1, 1);
      const ForwardPlan plan = select_forward(problem, device);
      EXPECT_TRUE(plan.variant.may_mask() && plan.variant.maps_masked());
    }
  }
}

// Beside them it has bounds of each block of keys, and of a dense forward the order of its tiles.
TEST(SelectMasked, TheWorkspaceHoldsTwoBitsForEachTileAndBlock) {
  const DeviceInfo device = gpu(90, 227);
  const Problem problem = masked(device, 128, 128, 8192);
  const ForwardPlan plan = select_forward(problem, device);
  const int tiles = 2 * 8192 / plan.variant.tile_m, blocks = 8192 / plan.variant.tile_n;
  EXPECT_EQ(plan.mask_tables_at, 16);
  EXPECT_EQ(plan.workspace_bytes, 16 + 2 * (tiles * (2 * 4 * (blocks / 32)) + 2 * blocks * 32) + 4 * (1 + tiles));
  EXPECT_LT(plan.workspace_bytes, 2 * 8192 * 16);  // less than the mask itself has
  Problem without = problem;
  without.masks_of_entry = 0;
  EXPECT_EQ(select_forward(without, device).workspace_bytes, 0);
}

TEST(SelectMasked, GradientsAreFormedByHoppersRows) {
  const DeviceInfo device = gpu(90, 227);
  for (int d = 8; d <= 256; d += 8) {
    const Problem problem = masked(device, d, d, 300);
    const BackwardPlan plan = select_backward(problem, device);
    EXPECT_TRUE(plan.variant.may_mask_backward());
    EXPECT_LE(plan.grid, device.multiprocessors);
    const std::int64_t tables = MaskTables::of_backward(problem, plan.variant, nullptr).bytes();
    EXPECT_EQ(plan.workspace_bytes, plan.mask_tables_at + tables);
    EXPECT_GE(plan.mask_tables_at, BackwardWorkspace::of(problem, plan.variant, plan.parts).bytes());
  }
}

/// Sums in order keep the kernel. Kernels of one pass then need to know, besides, which blocks of keys each tile sees.
TEST(SelectMasked, SumsInOrderTakeTheSameRows) {
  const DeviceInfo device = gpu(90, 227);
  for (const int d : {64, 128, 192, 256}) {
    Problem problem = masked(device, d, d);
    const Variant usual = select_backward(problem, device).variant;
    const std::int64_t bytes = MaskTables::of_backward(problem, usual, nullptr).bytes();
    problem.deterministic = true;
    EXPECT_EQ(select_backward(problem, device).variant, usual);
    const std::int64_t in_order = MaskTables::of_backward(problem, usual, nullptr).bytes();
    EXPECT_EQ(in_order,
              usual.two_passes() ? bytes : bytes + MaskTables::of_forward(problem, usual, nullptr).queries.bytes());
  }
}

/// So it is on every GPU but Hopper, and there with a softcap that is too large for Hopper's kernels.
TEST(SelectMasked, OnAmpereRowsThatKnowDropoutTakeColumns) {
  const DeviceInfo hopper = gpu(90, 227);
  for (const int memory : {99, 163})
    for (int d = 8; d <= 256; d += 8)
      for (const bool deterministic : {false, true}) {
        const DeviceInfo device = gpu(memory == 99 ? 86 : 80, memory);
        Problem problem = masked(device, d, d, 300);
        problem.deterministic = deterministic;
        const ForwardPlan forward = select_forward(problem, device);
        EXPECT_TRUE(forward.variant.arch == Arch::kSm80 && forward.variant.may_mask());
        EXPECT_EQ(forward.grid, forward.tiles);
        const BackwardPlan backward = select_backward(problem, device);
        EXPECT_TRUE(backward.variant.arch == Arch::kSm80 && backward.variant.may_mask_backward());
        EXPECT_EQ(backward.grid, backward.tiles);
      }
  Problem capped = masked(hopper, 64, 64);
  capped.softcap = 1000;
  EXPECT_EQ(select_forward(capped, hopper).variant.arch, Arch::kSm80);
  EXPECT_EQ(select_backward(capped, hopper).variant.arch, Arch::kSm80);
}

TEST(SelectMasked, MoreTilesThanAreCountedAreRefused) {
  const DeviceInfo hopper = gpu(90, 227);
  Problem many = masked(hopper, 128, 128, 128);
  many.batch = (1 << 17) - 1;
  EXPECT_EQ(refusal([&] { select_forward(many, hopper); }), "accepted");
  many.batch = 1 << 17;
  EXPECT_EQ(refusal([&] { select_forward(many, hopper); }),
            "mask is given with 1048576 tiles (batch × heads × blocks of rows), expected fewer than 1048576");
  EXPECT_EQ(refusal([&] { select_forward(masked(cpu(), 64, 64), cpu()); }), "accepted");
}

}  // namespace
}  // namespace flashtile
