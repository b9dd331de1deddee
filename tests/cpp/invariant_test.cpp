// These tests check batch-invariant calls: what a forward is over a cache, that splits of keys are joined in one order,
// and that no plan of a backward goes by the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "caches.h"
#include "calls.h"
#include "flashtile/flashtile.h"
#include "flashtile/scheduler/split_keys.h"

namespace flashtile {
namespace {

constexpr const char* kFunction = "attention";

KvcachePlan plan_of(const ForwardTensors& tensors, const TensorView& keys_end, const DeviceInfo& device) {
  const KvcacheOptions options{.attention = {.causal = true}, .batch_invariant = true};
  return plan_kvcache(kFunction, as_cache(tensors, keys_end), options, device);
}

TEST(AsCache, ADenseBatchIsACacheThatIsReadWhole) {
  with_call(kGpu, [](Call& call) {
    const KvcacheProblem cache = plan_of(call.forward, tensor({2}, DType::kInt32, kGpu), kH100).cache;
    EXPECT_EQ(cache.problem, [&] {
      Problem problem = check_forward(kFunction, call.forward, {.causal = true});
      problem.out_dtype = cache.problem.out_dtype;
      return problem;
    }());
    EXPECT_TRUE(cache.batch_invariant);
    EXPECT_FALSE(cache.appends);
    EXPECT_EQ(cache.pages, 2);
    EXPECT_EQ(cache.page_size, 100);
  });
}

TEST(AsCache, SequencesOfARaggedBatchShareTheOnlyEntry) {
  int begins[] = {0, 30, 30, 90};
  ForwardTensors t;
  t.q = tensor({50, 8, 64}, DType::kFloat16, kGpu);
  t.k = t.v = tensor({100, 4, 64}, DType::kFloat16, kGpu);
  t.cu_seqlens_q = t.cu_seqlens_k = contiguous(begins, DType::kInt32, {4}, kGpu);
  const TensorView keys_end = contiguous(begins + 1, DType::kInt32, {3}, kGpu);
  const KvcachePlan plan = plan_of(t, keys_end, kH100);
  EXPECT_EQ(plan.problem.batch, 3);
  EXPECT_TRUE(plan.problem.ragged);
  EXPECT_EQ(plan.problem.seqlen_q, 50);
  EXPECT_EQ(plan.cache.pages, 1);
  const KvcacheTensors tensors = as_cache(t, keys_end);
  const CachedRows rows = plan.cache.rows(tensors);
  const Pages pages = plan.cache.layout(tensors);
  for (int b = 0; b < 3; ++b) {
    EXPECT_EQ(rows.at(b).begin, begins[b]);
    EXPECT_EQ(rows.at(b).end, begins[b + 1]);
    const Pages::Place place = pages.at(b, 70);
    EXPECT_EQ(place.page, 0);
    EXPECT_EQ(place.row, 70);
  }
}

TEST(CheckInvariant, RefusesWhatHasNoSuchBits) {
  const auto check = [](Device device, const std::function<void(Call&)>& change) {
    std::string result;
    with_call(device, [&](Call& call) {
      change(call);
      const Problem problem = check_forward(kFunction, call.forward, call.options);
      result =
          kind_and_message([&] { check_invariant(kFunction, call.forward, call.options, problem, device == kGpu); });
    });
    return result;
  };
  for (const Device device : {Device{}, kGpu}) {
    EXPECT_EQ(check(device, [](Call&) {}), "accepted");
    EXPECT_EQ(
        check(device, [](Call& call) { call.options.dropout_p = 0.1; }),
        "Unsupported: attention: dropout_p is 0.1 with batch_invariant, expected 0, as what is dropped depends on "
        "the place in the batch");
  }
}

/// The first split of a tile, and with it the order in which splits are joined, may depend on which rows the tile has.
/// A row that two or more splits have keys for is in tiles that all begin with the same one, or with one an even number
/// before it.
TEST(KeysOfSplit, ARowsSplitsAreJoinedInOneOrder) {
  constexpr int kRows = 16, kItem = 256, kLength = 6000;
  for (const int left : {0, 70, 1000, 1008, 1009, 1500, 2031, 2032, 2033, 4096, Band::kUnbounded}) {
    KvcacheProblem cache = decode(kA100, 1, 1, 1, kLength);
    cache.problem.band = {left, 0};
    cache.batch_invariant = true;
    const int keys = select_kvcache(cache, kA100).keys_of_split;
    ASSERT_EQ(keys % 1024, 0);
    if (left == Band::kUnbounded || left <= 1008) {
      EXPECT_EQ(keys, 1024) << "no more than it takes";
    }
    const Mask mask{cache.problem.band};
    const SplitKeys schedule{.mask = mask, .packing = {Divisor(1)}, .keys_of_split = keys};
    for (int token = 0; token < kLength; ++token) {
      std::optional<int> order;
      for (int place = 0; place < std::min(kRows, token + 1); ++place) {  // of the token in its tile
        const Lengths lengths{kRows, token - place + kRows};
        const SplitKeys::Tile tile =
            schedule.tile<kRows, kItem>({0, kRows, kRows}, {.begin = 0, .held = 0, .end = lengths.k}, 0);
        const Range seen = mask.columns(place, lengths);
        const int first = seen.begin / keys, last = (seen.end - 1) / keys;
        if (first == last) continue;
        const int found = (first - tile.keys.begin / keys) % 2;
        ASSERT_EQ(order.value_or(found), found) << "token " << token << ", window " << left;
        order = found;
      }
    }
  }
}

/// In caches of different room splits are as long as each other, or the first one has all keys that both have room for.
TEST(KeysOfSplit, RoomDoesNotMatter) {
  for (const Band band : {Band{0, 0}, Band{1500, 0}, Band{4096, 0}, Band{1009, Band::kUnbounded}, Band::causal()}) {
    for (const int room : {0, 1, 600, 1100, 3000}) {
      for (const int larger : {1100, 5000, 100000}) {
        const auto keys = [&](int capacity) {
          KvcacheProblem cache = decode(kA100, 1, 1, 1, capacity);
          cache.problem.band = band;
          cache.batch_invariant = true;
          return select_kvcache(cache, kA100).keys_of_split;
        };
        EXPECT_TRUE(keys(room) == keys(larger) || std::min(keys(room), keys(larger)) >= std::min(room, larger));
      }
    }
  }
}

/// What the rounding of sums depends on: the tile, whether the first summand is added to zeros, and how many thread
/// blocks share a block of keys, which goes by the heads of a group alone.
TEST(SelectInvariantBackward, GoesByNoSizeOfTheCall) {
  for (const DeviceInfo& device : {kH100, kA100, kSmall}) {
    for (const int head_dim : {64, 72, 96, 128, 192, 256}) {
      for (const auto& [group, parts] : {std::pair{1, 1}, std::pair{7, 1}, std::pair{8, 2}, std::pair{32, 8}}) {
        std::set<std::string> kernels;
        std::set<int> stores;
        for (const int batch : {1, 3, 300}) {
          for (const int seqlen : {1, 20, 64, 333, 5000}) {
            for (const bool ragged : {false, true}) {
              Problem problem = decode(device, batch, 2, 4, seqlen).problem;
              problem.heads_q = problem.heads_k * group;
              problem.head_dim = problem.head_dim_v = head_dim;
              problem.seqlen_q = ragged ? batch * seqlen : 64;
              problem.seqlen_k *= ragged ? batch : 1;
              problem.ragged = ragged;
              const BackwardPlan plan = select_backward(problem, device, true);
              EXPECT_TRUE(plan.problem.deterministic);
              EXPECT_EQ(plan.parts, parts);
              kernels.insert(name_of(plan.variant));
              stores.insert(plan.most_that_store);
            }
          }
        }
        EXPECT_EQ(kernels.size(), 1u) << head_dim;
        EXPECT_EQ(stores.size(), 1u) << head_dim;
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
