// These tests check that the variant tables and select agree: every supported problem has a row, and every row has a
// problem.
#include "flashtile/registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "flashtile/error.h"
#include "flashtile/flashtile.h"
#include "flashtile/forward_memory.h"
#include "problems.h"

namespace flashtile {
namespace {

/// Returns one device of every kind that users have, with the CUDA programming guide's table of shared memory per
/// block.
std::vector<DeviceInfo> devices() {
  return {cpu(), gpu(80, 163), gpu(86, 99), gpu(87, 163), gpu(89, 99), gpu(90, 227), gpu(100, 227), gpu(120, 99)};
}

std::vector<DType> dtypes_of(const DeviceInfo& device) {
  if (device.device.type == DeviceType::kCpu) return {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  return {DType::kFloat16, DType::kBFloat16};
}

/// Calls `visit(problem, device)` for every kind of problem that is documented as supported.
template <class Visit>
void for_each_supported(Visit&& visit) {
  for (const DeviceInfo& device : devices())
    for (const DType dtype : dtypes_of(device))
      for (int d = 8; d <= 256; d += 8)
        for (int d_v = 8; d_v <= 256; d_v += 8)
          for (const int seqlen : {1, 130, 300, 9400}) {
            Problem problem = problem_on(device, dtype, d, d_v, seqlen);
            visit(problem, device);
            problem.sinks = true;
            visit(problem, device);
            problem.max_logits = true;
            visit(problem, device);
            problem.sinks = problem.max_logits = false;
            problem.deterministic = true;
            visit(problem, device);
            problem.dropout = Dropout::of(0.1, 7);
            visit(problem, device);
          }
}

TEST(Registry, EverySupportedProblemHasARowThatFits) {
  for_each_supported([](const Problem& problem, const DeviceInfo& device) {
    const ForwardPlan plan = select_forward(problem, device);
    ASSERT_EQ(plan.variant.dtype, problem.dtype);
    ASSERT_GE(plan.variant.head_dim, problem.head_dim);
    ASSERT_GE(plan.variant.head_dim_v, problem.head_dim_v);
    ASSERT_LE(plan.shared_memory, device.max_shared_memory) << to_string(plan);
    ASSERT_TRUE(device.compute_capability != 90 || plan.variant.arch != Arch::kSm90 ||
                plan.variant.knows(Features::kMaxLogits) == problem.max_logits);
    ASSERT_GE(plan.grid, 1);
    ASSERT_STRNE(plan.why, "");
    const BackwardPlan backward = select_backward(problem, device);
    ASSERT_GE(backward.variant.head_dim, problem.head_dim);
    ASSERT_GE(backward.variant.head_dim_v, problem.head_dim_v);
    ASSERT_LE(backward.shared_memory, device.max_shared_memory) << to_string(backward);
    if (device.device.type != DeviceType::kCpu) return;
    ASSERT_NE(plan.run, nullptr);
    ASSERT_NE(backward.run, nullptr);
  });
}

TEST(Registry, EveryRowIsReached) {
  std::set<std::string> reached;
  for_each_supported([&](const Problem& problem, const DeviceInfo& device) {
    reached.insert("forward " + name_of(select_forward(problem, device).variant));
    reached.insert("backward " + name_of(select_backward(problem, device).variant));
    const bool in_8_bits = problem.dtype == DType::kBFloat16 && !problem.dropout.active() && !problem.max_logits;
    if (device.compute_capability == 90 && in_8_bits)
      reached.insert("forward " + name_of(select_forward(of_fp8(problem), device).variant));
  });
  for (const ForwardRow& row : forward_rows())
    EXPECT_TRUE(reached.contains("forward " + name_of(row.variant))) << name_of(row.variant);
  for (const BackwardRow& row : backward_rows())
    EXPECT_TRUE(reached.contains("backward " + name_of(row.variant))) << name_of(row.variant);
}

TEST(Registry, EightBitsAreHoppersAlone) {
  for (const DeviceInfo& device : devices()) {
    const Problem problem = of_fp8(problem_on(device, DType::kBFloat16, 128, 128, 1000));
    if (device.compute_capability == 90)
      EXPECT_EQ(select_forward(problem, device).variant.dtype, DType::kE4M3);
    else
      EXPECT_THROW(select_forward(problem, device), Unsupported) << device.compute_capability;
    Problem drops = problem;
    drops.dropout = Dropout::of(0.1, 7);
    EXPECT_THROW(select_forward(drops, device), Unsupported);
    Problem masked = problem;
    masked.masks_of_entry = masked.masked_entries = 1;
    EXPECT_THROW(select_forward(masked, device), Unsupported);
  }
}

TEST(Registry, RowsAreDistinct) {
  std::set<std::string> names;
  for (const ForwardRow& row : forward_rows()) EXPECT_TRUE(names.insert(name_of(row.variant)).second);
}

TEST(Registry, KernelsAreThereAsTheBuildSays) {
  for (const ForwardRow& row : forward_rows())
    EXPECT_EQ(row.run != nullptr, row.variant.arch == Arch::kCpu || built_with_cuda()) << name_of(row.variant);
  for (const BackwardRow& row : backward_rows())
    EXPECT_EQ(row.run != nullptr, row.variant.arch == Arch::kCpu || built_with_cuda()) << name_of(row.variant);
  for (const KvcacheRow& row : kvcache_rows())
    EXPECT_EQ(row.run != nullptr, row.variant.arch == Arch::kCpu || built_with_cuda()) << name_of(row.variant);
}

TEST(Registry, NamesSayEveryField) {
  const Variant variant{Arch::kSm90, DType::kBFloat16, 192, 128, 64, 32, 2, 4};
  EXPECT_EQ(name_of(variant), "sm90_bf16_d192_v128_m64_n32_s2_w4");
  EXPECT_EQ(name_of(Variant{Arch::kSm80, DType::kFloat16, 64, 64, 64, 32, 2, 4, table::dropout_sinks}),
            "sm80_f16_d64_v64_m64_n32_s2_w4_dropout_sinks");
}

TEST(Registry, NamesEndWithTheWordOfTheTable) {
#define FORWARD(arch, dtype, d, d_v, m, n, stages, warps, features) \
  {{table::arch, table::dtype, d, d_v, m, n, stages, warps, table::features}, "_" #features},
#define BACKWARD FORWARD
#define KVCACHE FORWARD
  const std::pair<Variant, std::string> rows[] = {
#include "../../cpp/variants/backward.def"
#include "../../cpp/variants/forward.def"
#include "../../cpp/variants/kvcache.def"
  };
#undef FORWARD
#undef BACKWARD
#undef KVCACHE
  for (const auto& [variant, word] : rows) {
    const bool is_told = variant.arch != Arch::kCpu && word != "_plain";
    Variant plain = variant;
    plain.features = Features::kNone;
    EXPECT_EQ(name_of(variant), name_of(plain) + (is_told ? word : ""));
  }
}

TEST(Select, SmallWorkWakesFewThreads) {
  const DeviceInfo device = cpu(64);
  const ForwardPlan tiny = select_forward(problem_on(device, DType::kFloat32, 8, 8, 1), device);
  EXPECT_EQ(tiny.grid, 1);
  const ForwardPlan large = select_forward(problem_on(device, DType::kFloat32, 128, 128, 4096), device);
  EXPECT_EQ(large.grid, 64);
}

TEST(Select, HeadsArePackedOnTheCpuAsLongAsEveryThreadHasAnItem) {
  Problem p = problem_on(cpu(), DType::kFloat32, 128, 128, 1);
  p.batch = 1;
  p.heads_q = 24;  // the group has 12 heads
  p.seqlen_k = 1 << 16;
  for (const auto& [threads, packed] : {std::pair{1, 12}, {2, 12}, {3, 6}, {4, 6}, {5, 4}, {8, 3}, {9, 2}, {64, 1}}) {
    const ForwardPlan plan = select_forward(p, cpu(threads));
    EXPECT_EQ(plan.packed_heads, packed) << threads;
    EXPECT_EQ(plan.tiles, 24 / packed) << threads;
    EXPECT_EQ(plan.grid, std::min(threads, 24)) << threads;
    KvcacheProblem cache;
    cache.problem = p;
    EXPECT_EQ(select_kvcache(cache, cpu(threads)).packed_heads, packed) << threads;
  }
  p.heads_q = 0;
  EXPECT_EQ(select_forward(p, cpu(1)).tiles, 0);
  p.heads_q = 24;
  p.alibi = true;
  EXPECT_EQ(select_forward(p, cpu(1)).packed_heads, 1);
  p.alibi = false;
  p.dropout = Dropout::of(0.5, 1);
  EXPECT_EQ(select_forward(p, cpu(1)).packed_heads, 1);
  p.dropout = {};
  p.seqlen_q = 1 << 28;  // 12 times as many rows are more than int counts
  EXPECT_EQ(select_forward(p, cpu(1)).packed_heads, 1);
}

TEST(Select, CachesOnTheCpuCountAsFull) {
  KvcacheProblem cache;
  cache.problem = problem_on(cpu(), DType::kFloat32, 64, 64, 1);
  const auto grid = [&](int capacity) {
    cache.problem.seqlen_k = capacity;
    const KvcachePlan plan = select_kvcache(cache, cpu());
    EXPECT_EQ(plan.tiles, 2 * 2);  // entries × KV heads
    EXPECT_NE(plan.run, nullptr);
    return plan.grid;
  };
  EXPECT_EQ(grid(16), 1);
  EXPECT_EQ(grid(8192), 4);
  cache.problem.ragged = true;
  cache.problem.batch = 500;
  cache.problem.seqlen_q = 500;
  EXPECT_EQ(select_kvcache(cache, cpu()).grid, 4);
}

TEST(Select, RaggedBatchesOnTheCpuHavePlacesForEveryTile) {
  Problem p = problem_on(cpu(), DType::kFloat32, 64, 64, 1000);
  p.ragged = true;
  p.batch = 5;
  p.seqlen_k = 2000;
  const ForwardPlan forward = select_forward(p, cpu());
  EXPECT_EQ(forward.tiles, 2 * (4 * 1000 / 128 + 5));
  EXPECT_EQ(select_backward(p, cpu()).tiles, 2 * (2000 / 128 + 5));
  EXPECT_EQ(forward.grid, 4);
  p.batch = 0;
  EXPECT_EQ(select_forward(p, cpu()).grid, 1);
  EXPECT_EQ(select_backward(p, cpu()).grid, 1);
}

TEST(Select, EmptyProblemsAreLegal) {
  for (const DeviceInfo& device : devices()) {
    Problem problem = problem_on(device, DType::kFloat16, 64, 64, 0);
    EXPECT_EQ(select_forward(problem, device).tiles, 0);
    problem.seqlen_q = 10;
    EXPECT_GT(select_forward(problem, device).tiles, 0);  // rows that see nothing are written all the same
    problem.seqlen_q = 0;
    problem.batch = problem.heads_q = 1 << 29;
    EXPECT_EQ(select_forward(problem, device).tiles, 0);
  }
}

std::string refusal(const Problem& problem, const DeviceInfo& device) {
  try {
    select_forward(problem, device);
  } catch (const Unsupported& error) {
    return error.what();
  }
  return "none";
}

TEST(Select, RefusesAnOldGpu) {
  const DeviceInfo device = gpu(75, 64);
  EXPECT_EQ(refusal(problem_on(device, DType::kFloat16, 64, 64, 100), device),
            "q is on cuda:0 (a GPU, compute capability 7.5), expected compute capability 8.0 (Ampere) or newer");
}

TEST(Select, RefusesFloat32OnCudaAndNamesTheNearest) {
  const DeviceInfo device = gpu(90, 227);
  EXPECT_EQ(refusal(problem_on(device, DType::kFloat32, 64, 64, 100), device),
            "q has dtype float32 on cuda:0, expected float16 or bfloat16");
}

TEST(Select, RefusesAGridBeyondTheHardware) {
  const DeviceInfo device = gpu(90, 227);
  Problem problem = problem_on(device, DType::kFloat16, 64, 64, 1 << 20);
  problem.batch = 1 << 20;
  EXPECT_NE(refusal(problem, device).find("expected fewer than 2^31"), std::string::npos);
}

TEST(Select, ProblemsThatAskForLittleGetTheFasterRows) {
  for (const DeviceInfo& device : {gpu(80, 163), gpu(90, 227)}) {
    Problem problem = problem_on(device, DType::kFloat16, 64, 64, 1000);
    const bool hopper = device.compute_capability == 90;
    const auto forward = [&] { return select_forward(problem, device).variant.features; };
    const auto backward = [&] { return select_backward(problem, device).variant.features; };
    EXPECT_EQ(forward(), table::plain);
    EXPECT_EQ(backward(), table::plain);
    problem.deterministic = true;
    EXPECT_EQ(forward(), table::plain);
    EXPECT_EQ(backward(), hopper ? table::plain : table::dropout_ordered);
    problem.sinks = true;
    EXPECT_EQ(forward(), hopper ? table::sinks : table::dropout_sinks);
    problem.max_logits = true;
    EXPECT_EQ(forward(), hopper ? table::sinks_max_logits : table::dropout_sinks);
    EXPECT_EQ(backward(), hopper ? table::plain : table::dropout_ordered);
    problem.sinks = false;
    EXPECT_EQ(forward(), hopper ? table::sinks_max_logits : table::plain);
    problem.max_logits = false;
    problem.deterministic = false;
    problem.softcap = 10;
    EXPECT_EQ(forward(), table::plain);
    EXPECT_EQ(backward(), hopper ? table::dropout_softcap : table::plain);
    problem.softcap = 0;
    problem.dropout = Dropout::of(0.5, 7);
    for (const bool sinks : {true, false}) {
      problem.sinks = sinks;
      EXPECT_EQ(forward(), table::dropout_sinks);
    }
    EXPECT_EQ(backward(), hopper ? table::dropout_softcap : table::dropout_ordered);
    problem.head_dim = 256;
    EXPECT_EQ(backward(), hopper ? table::dropout : table::dropout_ordered);
  }
}

TEST(Select, UnusualSoftcapsOnHopperGoToAmperesKernels) {
  const DeviceInfo device = gpu(90, 227);
  const auto archs = [&](float softcap, int head_dim) {
    Problem problem = problem_on(device, DType::kBFloat16, head_dim, head_dim, 2048);
    problem.softcap = softcap;
    return std::pair(select_forward(problem, device).variant.arch, select_backward(problem, device).variant.arch);
  };
  for (int head_dim : {64, 128, 256}) {
    for (float softcap : {0.0f, 30.0f, kUsualSoftcap, 0x1p122f})  // the last softcap is so large that it counts as none
      EXPECT_EQ(archs(softcap, head_dim), std::pair(Arch::kSm90, Arch::kSm90));
    for (float softcap : {2 * kUsualSoftcap, 1e5f, 0x1p121f})
      EXPECT_EQ(archs(softcap, head_dim), std::pair(Arch::kSm80, Arch::kSm80));
  }
}

TEST(Plan, PrintsWhatWasDecided) {
  const DeviceInfo device = gpu(90, 227);
  const ForwardPlan plan = select_forward(problem_on(device, DType::kFloat16, 64, 64, 1000), device);
  const std::string text = to_string(plan);
  for (const std::string& part : {std::string("S_q=1000"), name_of(plan.variant), std::string(plan.why),
                                  std::to_string(plan.grid), std::to_string(plan.shared_memory / 1024) + " KiB"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nin\n" << text;
}

/// Returns the message of the Unsupported that `call` throws, or "".
template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Unsupported& error) {
    return error.what();
  }
  return "";
}

TEST(Run, AKernelThatIsNotInTheBuildIsRefused) {
  const DeviceInfo device = gpu(90, 227);
  ForwardPlan plan = select_forward(problem_on(device, DType::kFloat16, 64, 64, 1000), device);
  plan.run = nullptr;
  ForwardTensors tensors;
  tensors.out.rank = 4;
  tensors.out.shape = {2, 1000, 8, 64};
  const std::string said = refusal([&] { run_forward(plan, tensors, nullptr, nullptr); });
  EXPECT_EQ(said, name_of(plan.variant) + " is not in this build: flashtile was built without CUDA; " + kCudaRemedy);
  tensors.out.shape = {2, 0, 8, 64};
  EXPECT_NO_THROW(run_forward(plan, tensors, nullptr, nullptr));  // there is nothing to write
}

TEST(DeviceInfo, KnowsTheCpu) {
  const DeviceInfo& info = device_info({DeviceType::kCpu, 0});
  EXPECT_FALSE(info.name.empty());
  EXPECT_GE(info.threads, 1);
  EXPECT_THROW(device_info({DeviceType::kOther, 0}), Unsupported);
}

TEST(DeviceInfo, SaysWhatToDoAboutABuildWithoutCuda) {
  if (built_with_cuda()) GTEST_SKIP() << "this build holds CUDA kernels";
  EXPECT_EQ(refusal([] { device_info({DeviceType::kCuda, 1}); }),
            std::string("q is on cuda:1, expected the CPU: flashtile was built without CUDA; ") + kCudaRemedy);
}

/// In the kernel that runs before a backward, a warp takes up to four rows of a tile at a time.
TEST(Registry, BackwardTilesFitWhatRunsBeforeThem) {
  for (const BackwardRow& row : backward_rows()) {
    if (row.variant.arch == Arch::kCpu) continue;
    EXPECT_LE(row.variant.tile_m, kMostRowsOfBackwardTile) << name_of(row.variant);
    EXPECT_EQ(row.variant.tile_m % 4, 0) << name_of(row.variant);
  }
}

/// Of e4m3 numbers every tile that a row counts has a place, and second sums lie where the output is staged.
TEST(Registry, TilesOfE4M3FitIntoSharedMemory) {
  int rows = 0;
  for (const ForwardRow& row : forward_rows()) {
    if (!row.variant.fp8()) continue;
    const ForwardMemorySm90 memory = ForwardMemorySm90::of(row.variant);
    EXPECT_EQ(memory.stages_k + memory.stages_v + memory.stages_of_rows, row.variant.stages) << name_of(row.variant);
    EXPECT_EQ(memory.stages_k, memory.stages_of_rows) << name_of(row.variant);
    EXPECT_GE(memory.stages_v, 2) << name_of(row.variant);
    EXPECT_TRUE(memory.staged) << name_of(row.variant);
    EXPECT_LE(memory.bytes, 227 * 1024) << name_of(row.variant);
    ++rows;
  }
  EXPECT_EQ(rows, 5);
}

}  // namespace
}  // namespace flashtile
