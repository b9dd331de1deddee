#include <gtest/gtest.h>

#include "flashtile/kvcache.h"
#include "flashtile/plan.h"

namespace flashtile {
namespace {

TEST(Cost, VisibleElementsCountWhatTheMaskKeeps) {
  Problem problem;
  for (problem.seqlen_q = 0; problem.seqlen_q <= 9; ++problem.seqlen_q) {
    for (problem.seqlen_k = 0; problem.seqlen_k <= 9; ++problem.seqlen_k) {
      for (const int left : {-Band::kUnbounded, -20, -3, -1, 0, 1, 3, 20, Band::kUnbounded}) {
        for (const int right : {-Band::kUnbounded, -20, -3, -1, 0, 1, 3, 20, Band::kUnbounded}) {
          if (left < -right) continue;  // check lets no such band pass
          problem.band = {left, right};
          std::int64_t kept = 0;
          for (int i = 0; i < problem.seqlen_q; ++i)
            for (int j = 0; j < problem.seqlen_k; ++j) kept += problem.band.keep(i, j, problem.lengths());
          ASSERT_EQ(problem.visible_elements(), kept)
              << problem.seqlen_q << " × " << problem.seqlen_k << ", window " << left << ", " << right;
        }
      }
    }
  }
}

TEST(Cost, VisibleElementsOfTheLargestProblem) {
  constexpr std::int64_t kMost = (1 << 30) - 1;
  Problem problem;
  problem.seqlen_q = problem.seqlen_k = static_cast<int>(kMost);
  EXPECT_EQ(problem.visible_elements(), kMost * kMost);
  problem.band = Band::causal();
  EXPECT_EQ(problem.visible_elements(), kMost * (kMost + 1) / 2);
}

TEST(Cost, CountsMatmulsAndTraffic) {
  Problem problem;
  problem.batch = 2;
  problem.seqlen_q = 128;
  problem.seqlen_k = 256;
  problem.heads_q = 4;
  problem.heads_k = 2;
  problem.head_dim = 64;
  problem.head_dim_v = 32;
  problem.dtype = DType::kBFloat16;
  const std::int64_t pairs = 2 * 4 * 128 * 256;
  EXPECT_EQ(forward_cost(problem).flops, 2 * pairs * (64 + 32));
  EXPECT_EQ(backward_cost(problem).flops, 2 * pairs * (3 * 64 + 2 * 32));
  const std::int64_t q = 2 * 128 * 4 * 64, k = 2 * 256 * 2 * 64, v = 2 * 256 * 2 * 32, out = 2 * 128 * 4 * 32;
  EXPECT_EQ(forward_cost(problem).bytes, 2 * (q + k + v + out) + 4 * 2 * 128 * 4);
  EXPECT_GT(backward_cost(problem).bytes, forward_cost(problem).bytes);
}

TEST(Cost, OfTheLargestProblemIsMoreThan64BitsCount) {
  constexpr int kMost = (1 << 30) - 1;
  Problem problem;
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_k = kMost;
  problem.heads_q = problem.heads_k = 2;
  problem.head_dim = problem.head_dim_v = 8;
  problem.dtype = DType::kBFloat16;
  EXPECT_DOUBLE_EQ(forward_cost(problem).flops, 2.0 * 2 * 16 * kMost * kMost);
  EXPECT_DOUBLE_EQ(backward_cost(problem).flops, 2.0 * 2 * 40 * kMost * kMost);
}

TEST(Cost, OfARaggedBatchIsThatOfEquallyLongSequences) {
  Problem dense;
  dense.batch = 3;
  dense.seqlen_q = 40;
  dense.seqlen_k = 50;
  dense.heads_q = 4;
  dense.heads_k = 2;
  dense.head_dim = dense.head_dim_v = 64;
  dense.dtype = DType::kBFloat16;
  dense.band = Band::causal();
  Problem ragged = dense;
  ragged.ragged = true;
  ragged.seqlen_q *= 3;
  ragged.seqlen_k *= 3;
  EXPECT_EQ(forward_cost(ragged).flops, forward_cost(dense).flops);
  EXPECT_EQ(forward_cost(ragged).bytes, forward_cost(dense).bytes);
  EXPECT_EQ(backward_cost(ragged).flops, backward_cost(dense).flops);
  EXPECT_EQ(backward_cost(ragged).bytes, backward_cost(dense).bytes);

  KvcacheProblem cache{.problem = ragged};  // T_q queries, and room for S_k keys of each sequence
  cache.problem.seqlen_k = dense.seqlen_k;
  EXPECT_EQ(kvcache_cost(cache).flops, forward_cost(dense).flops);
  EXPECT_EQ(kvcache_cost(cache).bytes, forward_cost(dense).bytes);
}

}  // namespace
}  // namespace flashtile
