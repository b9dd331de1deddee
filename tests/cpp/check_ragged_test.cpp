// These tests break each rule about the tables of a ragged batch, and of the tensors that go with them, one at a time;
// those of every attention are in check_test.cpp.
#include "calls.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "flashtile/flashtile.h"

namespace flashtile {
namespace {

/// These tables have B = 3, T_q = 90, T_k = 100, the rest as in with_call: sequences of 40, 0, 45 queries and 30, 50,
/// 20 keys.
struct RaggedTables {
  std::vector<int> begins_q{0, 40, 40, 85}, begins_k{0, 30, 80, 100}, used_q{40, 0, 12}, used_k{0, 50, 20};
};

TensorView table(std::vector<int>& values, Device device = {}) {
  TensorView view = tensor({static_cast<std::int64_t>(values.size())}, DType::kInt32, device);
  view.data = values.data();
  return view;
}

std::string ragged(const std::function<void(Call&, RaggedTables&)>& change, Device device = {},
                   Problem* problem = nullptr) {
  std::string result;
  with_call(device, [&](Call& call) {
    RaggedTables tables;
    ForwardTensors& f = call.forward;
    for (TensorView* view :
         {&f.q, &f.k, &f.v, &f.out, &call.tensors.dout, &call.tensors.dq, &call.tensors.dk, &call.tensors.dv})
      *view = tensor({view->shape[1], view->shape[2], view->shape[3]}, view->dtype, device);
    f.lse = call.tensors.dlse = tensor({8, 90}, DType::kFloat32, device);
    f.cu_seqlens_q = table(tables.begins_q, device);
    f.cu_seqlens_k = table(tables.begins_k, device);
    f.seqused_q = table(tables.used_q, device);
    f.seqused_k = table(tables.used_k, device);
    change(call, tables);
    result = kind_and_message([&] {
      const Problem found = check_backward("attention_varlen", call.tensors, call.options);
      if (problem != nullptr) *problem = found;
    });
  });
  return result;
}

using Tables = RaggedTables;

TEST(CheckRagged, ALegalCallBecomesItsProblem) {
  Problem found;
  for (const Device device : {Device{}, kGpu}) {
    EXPECT_EQ(ragged([](Call&, Tables&) {}, device, &found), "accepted");
    const Problem expected{.batch = 3,
                           .seqlen_q = 90,
                           .seqlen_k = 100,
                           .ragged = true,
                           .heads_q = 8,
                           .heads_k = 4,
                           .head_dim = 64,
                           .head_dim_v = 32,
                           .dtype = DType::kFloat16,
                           .device = device,
                           .band = Band::full(),
                           .scale = 0.125f,
                           .softcap = 0,
                           .alibi = true,
                           .out_dtype = DType::kFloat16};
    EXPECT_EQ(found, expected);
  }
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.seqused_q = c.forward.seqused_k = {}; }), "accepted");
  EXPECT_EQ(to_string(found).substr(0, 52), "B=3 ragged T_q=90 T_k=100 H_q=8 H_k=4 D=64 D_v=32 fl");
}

TEST(CheckRagged, NoSequencesAndNoRowsAreLegal) {
  EXPECT_EQ(ragged([](Call& c, Tables& t) {
              t.begins_q = t.begins_k = {0};
              c.forward.cu_seqlens_q = table(t.begins_q);
              c.forward.cu_seqlens_k = table(t.begins_k);
              c.forward.seqused_q = c.forward.seqused_k = {};
            }),
            "accepted");
  EXPECT_EQ(ragged([](Call& c, Tables& t) {
              c.forward.k.shape[0] = c.forward.v.shape[0] = c.tensors.dk.shape[0] = c.tensors.dv.shape[0] = 0;
              t.begins_k = {0, 0, 0, 0};
              c.forward.seqused_k = {};
            }),
            "accepted");
}

TEST(CheckRagged, RanksAndShapes) {
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.q = tensor({2, 90, 8, 64}); }),
            "InvalidArgument: attention_varlen: q has shape (2, 90, 8, 64), expected 3 dimensions = (T_q, H_q, D)");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.k.shape[2] = 72; }),
            "InvalidArgument: attention_varlen: k has shape (100, 4, 72), expected (100, 4, 64) = (T_k, H_k, D)");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.v.shape[0] = 99; }),
            "InvalidArgument: attention_varlen: v has shape (99, 4, 32), expected (100, 4, 32) = (T_k, H_k, D_v)");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.q.shape[1] = 7; }),
            "InvalidArgument: attention_varlen: q has H_q = 7 heads, expected a multiple of H_k = 4 of k");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.v.shape[2] = 12; }),
            "InvalidArgument: attention_varlen: v has shape (100, 4, 12), expected D_v to be a multiple of 8 from 8 to "
            "256");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.out.shape[2] = 64; }),
            "InvalidArgument: attention_varlen: out has shape (90, 8, 64), expected (90, 8, 32) = (T_q, H_q, D_v)");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.lse = tensor({90, 8}, DType::kFloat32); }),
            "InvalidArgument: attention_varlen: lse has shape (90, 8), expected (8, 90) = (H_q, T_q)");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.tensors.dk.shape[0] = 1; }),
            "InvalidArgument: attention_varlen: dk has shape (1, 4, 64), expected (100, 4, 64) = (T_k, H_k, D)");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.q.shape[0] = 1 << 30; }),
            "InvalidArgument: attention_varlen: q has shape (1073741824, 8, 64), expected sizes (T_q, H_q, D) below "
            "2^30");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.alibi_slopes = tensor({3, 8}, DType::kFloat32); }), "accepted");
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.alibi_slopes = tensor({2, 8}, DType::kFloat32); }),
            "InvalidArgument: attention_varlen: alibi_slopes has shape (2, 8), expected (3, 8) = (B, H_q)");
}

TEST(CheckRagged, TablesLookLikeTables) {
  for (const Device device : {Device{}, kGpu}) {
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.cu_seqlens_k = {}; }, device),
              "InvalidType: attention_varlen: cu_seqlens_k is missing, expected a tensor (B + 1)");
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.cu_seqlens_q = {}; }, device),
              "InvalidType: attention_varlen: cu_seqlens_q is missing, expected a tensor (B + 1)");
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.cu_seqlens_q.rank = 2; }, device),
              "InvalidArgument: attention_varlen: cu_seqlens_q has shape (4, 0), expected 1 dimensions = (B + 1)");
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.cu_seqlens_q.shape[0] = 0; }, device),
              "InvalidArgument: attention_varlen: cu_seqlens_q has shape (0,), expected from 1 to 2^30 numbers = (B + "
              "1)");
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.cu_seqlens_k.shape[0] = 3; }, device),
              "InvalidArgument: attention_varlen: cu_seqlens_k has shape (3,), expected (4,) = (B + 1)");
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.seqused_q.shape[0] = 4; }, device),
              "InvalidArgument: attention_varlen: seqused_q has shape (4,), expected (3,) = (B)");
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.cu_seqlens_q.dtype = DType::kOther; }, device),
              "InvalidType: attention_varlen: cu_seqlens_q has dtype another dtype, expected int32");
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.seqused_k.dtype = DType::kFloat32; }, device),
              "InvalidType: attention_varlen: seqused_k has dtype float32, expected int32");
    EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.cu_seqlens_k.strides[0] = 2; }, device),
              "InvalidArgument: attention_varlen: cu_seqlens_k has strides (2,), expected a contiguous tensor");
  }
  EXPECT_EQ(ragged([](Call& c, Tables&) { c.forward.cu_seqlens_k.device = {}; }, kGpu),
            "InvalidArgument: attention_varlen: cu_seqlens_k is on cpu, expected cuda:0, as q");
}

TEST(CheckRagged, WhatTablesHold) {
  const std::pair<std::function<void(Tables&)>, const char*> cases[] = {
      {[](Tables& t) { t.begins_q[0] = 1; }, "cu_seqlens_q has 1 at index 0, expected 0"},
      {[](Tables& t) { t.begins_k[2] = 29; }, "cu_seqlens_k has 29 at index 2, expected at least 30, the one before"},
      {[](Tables& t) { t.begins_q[3] = 91; }, "cu_seqlens_q has 91 at index 3, expected at most 90 = T_q"},
      {[](Tables& t) { t.begins_k[3] = 101; }, "cu_seqlens_k has 101 at index 3, expected at most 100 = T_k"},
      {[](Tables& t) { t.begins_q[1] = -1; }, "cu_seqlens_q has -1 at index 1, expected at least 0, the one before"},
      {[](Tables& t) { t.used_q[2] = -1; }, "seqused_q has -1 at index 2, expected from 0 to the sequence's length 45"},
      {[](Tables& t) { t.used_k[1] = 51; }, "seqused_k has 51 at index 1, expected from 0 to the sequence's length 50"},
  };
  for (const auto& [change, message] : cases) {
    const auto break_it = [&change = change](Call&, Tables& t) { change(t); };
    EXPECT_EQ(ragged(break_it), std::string("InvalidArgument: attention_varlen: ") + message);
    EXPECT_EQ(ragged(break_it, kGpu), "accepted");  // tables on a GPU are not read
  }
}

TEST(CheckRagged, WithoutBeginsNothingIsRagged) {
  std::vector<int> used{90, 90};
  EXPECT_EQ(forward([&](Call& c) { c.forward.seqused_q = table(used); }),
            "InvalidArgument: attention: seqused_q is given, expected none without cu_seqlens_q and cu_seqlens_k");
  EXPECT_EQ(forward([&](Call& c) { c.forward.seqused_k = table(used); }),
            "InvalidArgument: attention: seqused_k is given, expected none without cu_seqlens_q and cu_seqlens_k");
}

}  // namespace
}  // namespace flashtile
