// These tests plan calls: what a plan checks besides the arguments of check_test.cpp, and how it refuses.
#include "calls.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "flashtile/flashtile.h"

namespace flashtile {
namespace {

/// This address lies beyond what the tensors of a call reach.
char* const place = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(memory) + (1 << 24));

TEST(Plan, ResultsGoToMemoryOfTheirOwn) {
  const auto plan = [](const std::function<void(Call&)>& change) {
    std::string result;
    with_call(kGpu, [&](Call& call) {
      call.forward.out.data = place;
      change(call);
      const DeviceInfo gpu{.device = kGpu,
                           .name = "A100",
                           .compute_capability = 80,
                           .multiprocessors = 108,
                           .max_shared_memory = 166912};
      result = kind_and_message([&] { plan_forward("attention", call.forward, call.options, gpu); });
    });
    return result;
  };
  EXPECT_EQ(plan([](Call& c) { c.forward.out = {}; }), "accepted");
  for (TensorView ForwardTensors::* read : {&ForwardTensors::q, &ForwardTensors::k, &ForwardTensors::v}) {
    const char* const name = read == &ForwardTensors::q ? "q" : read == &ForwardTensors::k ? "k" : "v";
    EXPECT_EQ(
        plan([&](Call& c) { (c.forward.*read).data = place; }),
        std::string("InvalidArgument: attention: out shares memory with ") + name + ", expected memory of its own");
  }
  EXPECT_EQ(plan([](Call& c) { c.forward.out.strides[1] = 0; }),
            "InvalidArgument: attention: out has stride 0 in dimension 1, expected memory of its own for each row");
  EXPECT_EQ(plan([](Call& c) { c.forward.out.strides[1] /= 2; }),
            "InvalidArgument: attention: out has strides (23040, 128, 32, 1), expected memory of its own for each row");
  // A copy would have to be copied back, so that what can be copied where it is read is refused here.
  EXPECT_EQ(plan([](Call& c) { c.forward.out.data = place + 2; }),
            "Unsupported: attention: out is at an address that is not a multiple of 16 bytes, expected one on CUDA");
  EXPECT_EQ(plan([](Call& c) { c.forward.out.strides[1] += 4; }),
            "Unsupported: attention: out has strides (23040, 260, 32, 1), expected multiples of 16 bytes on CUDA");
}

TEST(Plan, NamesTheFunctionWhenSelectRefuses) {
  with_call(kGpu, [](Call& call) {
    call.forward.out.data = place;
    const DeviceInfo old_gpu{.device = kGpu, .name = "Tesla T4", .compute_capability = 75};
    EXPECT_EQ(kind_and_message([&] { plan_forward("attention", call.forward, call.options, old_gpu); }),
              "Unsupported: attention: q is on cuda:0 (Tesla T4, compute capability 7.5), expected compute capability "
              "8.0 (Ampere) or newer");
    EXPECT_EQ(kind_and_message([&] {
                plan_backward("attention backward", call.tensors, call.options, old_gpu);
              }).substr(0, 32),
              "Unsupported: attention backward:");
  });
}

}  // namespace
}  // namespace flashtile
