// These tests break each rule about arguments, one at a time, and expect the right exception, with the function, the
// argument, what was found and what was expected; those of ragged batches are in check_ragged_test.cpp.
#include "calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "flashtile/flashtile.h"

namespace flashtile {
namespace {

std::string backward(const std::function<void(Call&)>& change, Device device = {}) {
  std::string result;
  with_call(device, [&](Call& call) {
    change(call);
    result = kind_and_message([&] { check_backward("attention", call.tensors, call.options); });
  });
  return result;
}

Problem accepted(const std::function<void(Call&)>& change) {
  Problem problem;
  with_call({}, [&](Call& call) {
    change(call);
    problem = check_forward("attention", call.forward, call.options);
  });
  return problem;
}

TEST(Check, ALegalCallBecomesItsProblem) {
  const Problem p = accepted([](Call&) {});
  const Problem expected{.batch = 2,
                         .seqlen_q = 90,
                         .seqlen_k = 100,
                         .heads_q = 8,
                         .heads_k = 4,
                         .head_dim = 64,
                         .head_dim_v = 32,
                         .dtype = DType::kFloat16,
                         .device = {},
                         .band = Band::full(),
                         .scale = 0.125f,
                         .softcap = 0,
                         .alibi = true,
                         .out_dtype = DType::kFloat16};
  EXPECT_EQ(p, expected);
  EXPECT_EQ(backward([](Call&) {}), "accepted");
  EXPECT_EQ(backward([](Call&) {}, kGpu), "accepted");
}

TEST(Check, OutputsSlopesAndGradientsMayBeLeftOut) {
  EXPECT_EQ(forward([](Call& c) { c.forward.out = c.forward.lse = c.forward.alibi_slopes = {}; }), "accepted");
  EXPECT_FALSE(accepted([](Call& c) { c.forward.alibi_slopes = {}; }).alibi);
  EXPECT_EQ(backward([](Call& c) { c.tensors.dlse = {}; }), "accepted");
  EXPECT_EQ(backward([](Call& c) { c.tensors.dq = c.tensors.dv = {}; }), "accepted");
}

TEST(Check, OptionsBecomeABand) {
  EXPECT_EQ(accepted([](Call& c) { c.options.causal = true; }).band, Band::causal());
  EXPECT_EQ(accepted([](Call& c) { c.options.window_left = 7; }).band, (Band{7, Band::kUnbounded}));
  EXPECT_EQ(accepted([](Call& c) { c.options = {.causal = true, .window_left = 7, .window_right = 9}; }).band,
            (Band{7, 0}));
  EXPECT_EQ(accepted([](Call& c) { c.options.window_right = std::int64_t{1} << 40; }).band, Band::full());
  EXPECT_EQ(accepted([](Call& c) { c.options.scale = -2.0; }).scale, -2.0f);
}

TEST(Check, EmptyTensorsAreLegal) {
  EXPECT_EQ(forward([](Call& c) {
              c.forward.q = tensor({2, 0, 8, 64});
              c.forward.out = tensor({2, 0, 8, 32});
              c.forward.lse = tensor({2, 8, 0}, DType::kFloat32);
            }),
            "accepted");
  EXPECT_EQ(forward([](Call& c) {
              c.forward.k = tensor({2, 0, 4, 64});
              c.forward.v = tensor({2, 0, 4, 32});
            }),
            "accepted");
}

TEST(Check, Rank) {
  EXPECT_EQ(forward([](Call& c) { c.forward.q = tensor({90, 8, 64}); }),
            "InvalidArgument: attention: q has shape (90, 8, 64), expected 4 dimensions = (B, S_q, H_q, D)");
  EXPECT_EQ(forward([](Call& c) { c.forward.v = tensor({2, 100}); }),
            "InvalidArgument: attention: v has shape (2, 100), expected 4 dimensions = (B, S_k, H_k, D_v)");
}

TEST(Check, MissingTensor) {
  EXPECT_EQ(forward([](Call& c) { c.forward.k = {}; }),
            "InvalidType: attention: k is missing, expected a tensor (B, S_k, H_k, D)");
  EXPECT_EQ(backward([](Call& c) { c.tensors.dout = {}; }),
            "InvalidType: attention: dout is missing, expected a tensor (B, S_q, H_q, D_v)");
}

TEST(Check, Shapes) {
  EXPECT_EQ(forward([](Call& c) { c.forward.k.shape[0] = 3; }),
            "InvalidArgument: attention: k has shape (3, 100, 4, 64), expected (2, 100, 4, 64) = (B, S_k, H_k, D)");
  EXPECT_EQ(forward([](Call& c) { c.forward.k.shape[3] = 72; }),
            "InvalidArgument: attention: k has shape (2, 100, 4, 72), expected (2, 100, 4, 64) = (B, S_k, H_k, D)");
  EXPECT_EQ(forward([](Call& c) { c.forward.v.shape[2] = 8; }),
            "InvalidArgument: attention: v has shape (2, 100, 8, 32), expected (2, 100, 4, 32) = (B, S_k, H_k, D_v)");
  EXPECT_EQ(forward([](Call& c) { c.forward.v.shape[1] = 99; }),
            "InvalidArgument: attention: v has shape (2, 99, 4, 32), expected (2, 100, 4, 32) = (B, S_k, H_k, D_v)");
}

TEST(Check, DTypes) {
  EXPECT_EQ(forward([](Call& c) { c.forward.q.dtype = DType::kInt32; }),
            "InvalidType: attention: q has dtype int32, expected float32, float16 or bfloat16");
  EXPECT_EQ(forward([](Call& c) { c.forward.q.dtype = DType::kOther; }),
            "InvalidType: attention: q has dtype another dtype, expected float32, float16 or bfloat16");
  EXPECT_EQ(forward([](Call& c) { c.forward.k.dtype = DType::kBFloat16; }),
            "InvalidType: attention: k has dtype bfloat16, expected float16, as q");
  EXPECT_EQ(forward([](Call& c) { c.forward.v.dtype = DType::kFloat32; }),
            "InvalidType: attention: v has dtype float32, expected float16, as q");
}

/// Makes q, k and v e4m3 numbers, each with a descale.
void to_e4m3(Call& c) {
  c.forward.q.dtype = c.forward.k.dtype = c.forward.v.dtype = DType::kE4M3;
  c.forward.out.dtype = DType::kBFloat16;
  const Device device = c.forward.q.device;
  c.forward.q_descale = tensor({2, 4}, DType::kFloat32, device);
  c.forward.k_descale = tensor({2, 4, 2}, DType::kFloat32, device);
  c.forward.v_descale = tensor({2, 4, 1}, DType::kFloat32, device);
}

std::string e4m3(const std::function<void(Call&)>& change, Device device = {}) {
  return forward([&](Call& c) { to_e4m3(c), change(c); }, device);
}

TEST(Check, E4m3NumbersHaveAnOutOfAnotherDtype) {
  EXPECT_EQ(e4m3([](Call&) {}, kGpu), "accepted");
  const Problem p = accepted(to_e4m3);
  EXPECT_TRUE(p.fp8);
  EXPECT_EQ(p.dtype, DType::kE4M3);
  EXPECT_EQ(p.out_dtype, DType::kBFloat16);
  const auto wide = [](Call& c) { c.options.out_dtype = c.forward.out.dtype = DType::kFloat32; };
  EXPECT_EQ(e4m3(wide), "accepted");
  EXPECT_EQ(e4m3(wide, kGpu), "InvalidType: attention: out_dtype is float32, expected bfloat16 or float16");
  EXPECT_EQ(e4m3([](Call& c) { c.options.out_dtype = DType::kInt32; }),
            "InvalidType: attention: out_dtype is int32, expected bfloat16, float16 or float32");
  EXPECT_EQ(e4m3([](Call& c) { c.options.out_dtype = DType::kFloat16; }),
            "InvalidType: attention: out has dtype bfloat16, expected float16");
  EXPECT_EQ(e4m3([](Call& c) { c.forward.k.dtype = DType::kE5M2; }),
            "InvalidType: attention: k has dtype float8_e5m2, expected float8_e4m3fn, as q");
  EXPECT_EQ(backward(to_e4m3), "Unsupported: attention: q has dtype float8_e4m3fn, expected one of 16 bits or float32");
}

TEST(Check, OnlyE4m3NumbersHaveDescalesAndAnOutDtype) {
  EXPECT_EQ(forward([](Call& c) { c.forward.k_descale = tensor({2, 4}, DType::kFloat32); }),
            "InvalidType: attention: q has dtype float16, expected float8_e4m3fn, as k_descale is given");
  EXPECT_EQ(forward([](Call& c) { c.options.out_dtype = DType::kFloat16; }),
            "InvalidType: attention: q has dtype float16, expected float8_e4m3fn, as out_dtype is given");
  EXPECT_EQ(forward([](Call& c) { c.options.fp8 = true; }),
            "InvalidType: attention: q has dtype float16, expected float32");
}

TEST(Check, Descales) {
  EXPECT_EQ(e4m3([](Call& c) { c.forward.q_descale = c.forward.k_descale = c.forward.v_descale = {}; }), "accepted");
  EXPECT_EQ(e4m3([](Call& c) { c.forward.q_descale = tensor({2, 8, 2}, DType::kFloat32); }), "accepted");
  EXPECT_EQ(e4m3([](Call& c) { c.forward.q_descale.strides = {3, 7}; }), "accepted");
  EXPECT_EQ(e4m3([](Call& c) { c.forward.q_descale.dtype = DType::kFloat16; }),
            "InvalidType: attention: q_descale has dtype float16, expected float32");
  EXPECT_EQ(e4m3([](Call& c) { c.forward.v_descale.device = kGpu; }),
            "InvalidArgument: attention: v_descale is on cuda:0, expected cpu, as q");
  for (const auto& [shape, found] :
       {std::pair{std::vector{3, 8}, "(3, 8)"}, {{2, 5}, "(2, 5)"}, {{2}, "(2,)"}, {{2, 8, 3}, "(2, 8, 3)"}})
    EXPECT_EQ(e4m3([&](Call& c) {
                c.forward.q_descale.rank = static_cast<int>(shape.size());
                std::copy(shape.begin(), shape.end(), c.forward.q_descale.shape.begin());
              }),
              std::string("InvalidArgument: attention: q_descale has shape ") + found +
                  ", expected (B, H) or (B, H, 1 or 2), for blocks of 64 or 128 rows, where B is 2 and H 8 or 4");
  EXPECT_EQ(e4m3([](Call& c) { c.forward.k_descale = tensor({2, 8}, DType::kFloat32); }),
            "InvalidArgument: attention: k_descale has shape (2, 8), expected (B, H) or (B, H, 1 or 2), for blocks of "
            "64 or 128 rows, where B is 2 and H 4");
}

TEST(Check, RowsOfE4m3ThatAreNoMultiplesOf16Bytes) {
  const auto narrow = [](Call& c) {
    for (TensorView* x : {&c.forward.q, &c.forward.k})
      *x = tensor({2, x->shape[1], x->shape[2], 40}, DType::kE4M3, x->device);
  };
  EXPECT_EQ(e4m3(narrow), "accepted");
  EXPECT_EQ(e4m3(narrow, kGpu),
            "Unsupported: attention: q has head dimension 40, expected a multiple of 16 of float8_e4m3fn on CUDA");
  // Such calls are computed in another way, where all else is legal.
  EXPECT_EQ(e4m3([&](Call& c) { narrow(c), c.forward.k_descale.shape[0] = 1; }, kGpu).substr(0, 16),
            "InvalidArgument:");
  EXPECT_EQ(e4m3([](Call& c) { c.forward.k.data = memory + 2; }, kGpu),
            "Unreadable: attention: k is at an address that is not a multiple of 16 bytes, expected one on CUDA");
  EXPECT_EQ(e4m3([](Call& c) { c.forward.k.strides[3] = 2; }),
            "Unreadable: attention: k has stride 2 in its last dimension, expected 1");
}

TEST(Check, Devices) {
  EXPECT_EQ(forward([](Call& c) { c.forward.v.device = kGpu; }),
            "InvalidArgument: attention: v is on cuda:0, expected cpu, as q");
  EXPECT_EQ(forward([](Call& c) { c.forward.k.device.index = 1; }, kGpu),
            "InvalidArgument: attention: k is on cuda:1, expected cuda:0, as q");
}

TEST(Check, Heads) {
  EXPECT_EQ(forward([](Call& c) { c.forward.q.shape[2] = 7; }),
            "InvalidArgument: attention: q has H_q = 7 heads, expected a multiple of H_k = 4 of k");
  EXPECT_EQ(forward([](Call& c) { c.forward.k.shape[2] = c.forward.v.shape[2] = 0; }),
            "InvalidArgument: attention: k has shape (2, 100, 0, 64), expected at least one head");
}

TEST(Check, HeadDimensions) {
  for (const int d : {0, 4, 100, 264, 512}) {
    const std::string size = std::to_string(d);
    EXPECT_EQ(forward([&](Call& c) { c.forward.q.shape[3] = c.forward.k.shape[3] = d; }),
              "InvalidArgument: attention: q has shape (2, 90, 8, " + size +
                  "), expected D to be a multiple of 8 from 8 to 256");
    EXPECT_EQ(forward([&](Call& c) { c.forward.v.shape[3] = d; }),
              "InvalidArgument: attention: v has shape (2, 100, 4, " + size +
                  "), expected D_v to be a multiple of 8 from 8 to 256");
  }
}

TEST(Check, Lengths) {
  EXPECT_EQ(forward([](Call& c) { c.forward.q.shape[1] = 1 << 30; }),
            "InvalidArgument: attention: q has shape (2, 1073741824, 8, 64), expected sizes (B, S_q, H_q, D) below "
            "2^30");
}

TEST(Check, LastDimensionIsContiguous) {
  EXPECT_EQ(forward([](Call& c) { c.forward.k.strides = {51200, 512, 128, 2}; }),
            "InvalidArgument: attention: k has stride 2 in its last dimension, expected 1");
  EXPECT_EQ(forward([](Call& c) { c.forward.k.strides = {0, 64, 6400, 1}; }), "accepted");  // others are all legal
  EXPECT_EQ(forward([](Call& c) {
              c.forward.q = tensor({2, 90, 1, 64});
              c.forward.k = tensor({2, 100, 1, 64});
              c.forward.v = tensor({2, 100, 1, 32});
              c.forward.out = c.forward.lse = {};
              c.forward.alibi_slopes = tensor({1}, DType::kFloat32);
              c.forward.alibi_slopes.strides[0] = 17;  // the stride of one element is ignored
            }),
            "accepted");
}

constexpr std::int64_t kUnset = std::int64_t{1} << 60;

/// Returns the band of a window, whose unbounded sides are kUnset.
Band band_of(std::int64_t left, std::int64_t right, bool causal = false) {
  return accepted([&](Call& c) {
           c.options.causal = causal;
           if (left != kUnset) c.options.window_left = left;
           if (right != kUnset) c.options.window_right = right;
         })
      .band;
}

TEST(Check, WindowsLieOnEitherSideOfTheDiagonal) {
  EXPECT_EQ(band_of(kUnset, -1), (Band{Band::kUnbounded, -1}));
  EXPECT_EQ(band_of(100, -50), (Band{100, -50}));
  EXPECT_EQ(band_of(-50, 100), (Band{-50, 100}));
  EXPECT_EQ(band_of(-50, kUnset), (Band{-50, Band::kUnbounded}));
  EXPECT_EQ(band_of(-50, 50), (Band{-50, 50}));  // one key
  EXPECT_EQ(band_of(kUnset, -1, true), (Band{Band::kUnbounded, -1}));
  EXPECT_EQ(band_of(100, -50, true), (Band{100, -50}));
}

/// Kernels rely on a band's end not coming before its begin: see options.cpp.
TEST(Check, WindowsOfNoKeyAreOneBand) {
  constexpr Band kNothing{Band::kUnbounded, -Band::kUnbounded};
  constexpr std::int64_t kFar = std::int64_t{1} << 40, kLeast = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(band_of(-3, 2), kNothing);
  EXPECT_EQ(band_of(2, -3), kNothing);
  EXPECT_EQ(band_of(-1, -1), kNothing);
  EXPECT_EQ(band_of(-50, 100, true), kNothing);
  EXPECT_EQ(band_of(-1, kUnset, true), kNothing);
  EXPECT_EQ(band_of(kUnset, -kFar), kNothing);
  EXPECT_EQ(band_of(-kFar, kUnset), kNothing);
  EXPECT_EQ(band_of(-kFar, kFar), kNothing);
  EXPECT_EQ(band_of(kLeast, kLeast), kNothing);
  EXPECT_NE(band_of(kUnset, 1 - Band::kUnbounded), kNothing);  // which a sequence of 2^30 keys would tell apart
}

TEST(Check, WindowsArePrinted) {
  const auto text = [](std::int64_t left, std::int64_t right) {
    const std::string whole = to_string(accepted([&](Call& c) {
      c.options.window_right = right;
      if (left != kUnset) c.options.window_left = left;
    }));
    return whole.substr(whole.find(", ") + 2, whole.find(", scale") - whole.find(", ") - 2);
  };
  EXPECT_EQ(text(100, -50), "window (100, -50)");
  EXPECT_EQ(text(kUnset, -1), "window (None, -1)");
  EXPECT_EQ(text(-3, 2), "window that shows nothing");
}

TEST(Check, Numbers) {
  EXPECT_EQ(forward([](Call& c) { c.options.scale = std::nan(""); }),
            "InvalidArgument: attention: scale is nan, expected a finite float32 number");
  EXPECT_EQ(forward([](Call& c) { c.options.scale = INFINITY; }),
            "InvalidArgument: attention: scale is inf, expected a finite float32 number");
  EXPECT_EQ(forward([](Call& c) { c.options.scale = 1e39; }),
            "InvalidArgument: attention: scale is 1e+39, expected a finite float32 number");
  EXPECT_EQ(forward([](Call& c) { c.options.softcap = std::nan(""); }),
            "InvalidArgument: attention: softcap is nan, expected a finite float32 number");
  EXPECT_EQ(forward([](Call& c) { c.options.softcap = -0.5; }),
            "InvalidArgument: attention: softcap is -0.5, expected a number of at least 0");
}

TEST(Check, AlibiSlopes) {
  EXPECT_EQ(forward([](Call& c) { c.forward.alibi_slopes = tensor({2, 8}, DType::kFloat32); }), "accepted");
  EXPECT_EQ(forward([](Call& c) { c.forward.alibi_slopes = tensor({4}, DType::kFloat32); }),
            "InvalidArgument: attention: alibi_slopes has shape (4,), expected (8,) = (H_q)");
  EXPECT_EQ(forward([](Call& c) { c.forward.alibi_slopes = tensor({3, 8}, DType::kFloat32); }),
            "InvalidArgument: attention: alibi_slopes has shape (3, 8), expected (2, 8) = (B, H_q)");
  EXPECT_EQ(forward([](Call& c) { c.forward.alibi_slopes.dtype = DType::kFloat16; }),
            "InvalidType: attention: alibi_slopes has dtype float16, expected float32");
  EXPECT_EQ(forward([](Call& c) { c.forward.alibi_slopes.device = {}; }, kGpu),
            "InvalidArgument: attention: alibi_slopes is on cpu, expected cuda:0, as q");
}

TEST(Check, ColumnMasks) {
  const auto with_mask = [](TensorView mask, Device device = {}) {
    return forward([&](Call& c) { c.forward.mask = mask; }, device);
  };
  for (const std::int64_t entries : {1, 2})
    for (const std::int64_t heads : {1, 4, 8}) {
      EXPECT_EQ(with_mask(tensor({entries, heads, 100, 4}, DType::kInt32)), "accepted");
      const Problem p = accepted([&](Call& c) { c.forward.mask = tensor({entries, heads, 100, 4}, DType::kInt32); });
      EXPECT_EQ(p.masks_of_entry, heads);
      EXPECT_EQ(p.masked_entries, entries);
    }
  EXPECT_FALSE(accepted([](Call&) {}).column_masked());
  EXPECT_EQ(with_mask(tensor({1, 100, 4}, DType::kInt32)),
            "InvalidArgument: attention: mask has shape (1, 100, 4), expected 4 dimensions = (1 or B, 1 or H_k or H_q, "
            "S_k, 4)");
  EXPECT_EQ(
      with_mask(tensor({3, 1, 100, 4}, DType::kInt32)),
      "InvalidArgument: attention: mask has shape (3, 1, 100, 4), expected 1 or B = 2 entries in (1 or B, 1 or H_k "
      "or H_q, S_k, 4)");
  EXPECT_EQ(
      with_mask(tensor({1, 2, 100, 4}, DType::kInt32)),
      "InvalidArgument: attention: mask has shape (1, 2, 100, 4), expected 1, H_k = 4 or H_q = 8 heads in (1 or B, "
      "1 or H_k or H_q, S_k, 4)");
  EXPECT_EQ(
      with_mask(tensor({1, 1, 90, 4}, DType::kInt32)),
      "InvalidArgument: attention: mask has shape (1, 1, 90, 4), expected (..., 100, 4) = (1 or B, 1 or H_k or H_q, "
      "S_k, 4)");
  EXPECT_EQ(with_mask(tensor({1, 1, 100, 4})), "InvalidType: attention: mask has dtype float16, expected int32");
  EXPECT_EQ(with_mask(tensor({1, 1, 100, 4}, DType::kInt32), kGpu),
            "InvalidArgument: attention: mask is on cpu, expected cuda:0, as q");
  TensorView strided = tensor({1, 1, 100, 4}, DType::kInt32);
  strided.strides = {400, 400, 1, 100};
  EXPECT_EQ(
      with_mask(strided),
      "Unreadable: attention: mask has strides (400, 400, 1, 100), expected (multiples of 4, multiples of 4, 4, 1)");
  TensorView between = tensor({1, 1, 100, 4}, DType::kInt32);
  between.data = memory + 4;
  EXPECT_EQ(with_mask(between),
            "Unreadable: attention: mask is at an address that is not a multiple of 16 bytes, expected one that is");
}

TEST(Check, Sinks) {
  const auto with_sinks = [](TensorView sinks, Device device = {}) {
    return forward([&](Call& c) { c.forward.sinks = sinks; }, device);
  };
  EXPECT_EQ(with_sinks(tensor({8}, DType::kFloat32)), "accepted");
  EXPECT_EQ(with_sinks(tensor({4}, DType::kFloat32)),
            "InvalidArgument: attention: sinks has shape (4,), expected (8,) = (H_q)");
  EXPECT_EQ(with_sinks(tensor({2, 8}, DType::kFloat32)),
            "InvalidArgument: attention: sinks has shape (2, 8), expected 1 dimensions = (H_q)");
  EXPECT_EQ(with_sinks(tensor({8}, DType::kFloat16)),
            "InvalidType: attention: sinks has dtype float16, expected float32");
  EXPECT_EQ(with_sinks(tensor({8}, DType::kFloat32), kGpu),
            "InvalidArgument: attention: sinks is on cpu, expected cuda:0, as q");
  TensorView strided = tensor({8}, DType::kFloat32);
  strided.strides[0] = 2;
  EXPECT_EQ(with_sinks(strided), "Unreadable: attention: sinks has stride 2 in its last dimension, expected 1");
  EXPECT_TRUE(accepted([](Call& c) { c.forward.sinks = tensor({8}, DType::kFloat32); }).sinks);
  EXPECT_FALSE(accepted([](Call&) {}).sinks);
}

TEST(Check, GradientOfSinks) {
  const auto with_gradient = [](TensorView dsinks) {
    return backward([&](Call& c) {
      c.forward.sinks = tensor({8}, DType::kFloat32);
      c.tensors.dsinks = dsinks;
    });
  };
  EXPECT_EQ(with_gradient(tensor({8}, DType::kFloat32)), "accepted");
  EXPECT_EQ(with_gradient(tensor({7}, DType::kFloat32)),
            "InvalidArgument: attention: dsinks has shape (7,), expected (8,) = (H_q)");
  EXPECT_EQ(with_gradient(tensor({8})), "InvalidType: attention: dsinks has dtype float16, expected float32");
  EXPECT_EQ(backward([](Call& c) { c.tensors.dsinks = tensor({8}, DType::kFloat32); }),
            "InvalidArgument: attention: dsinks is given, expected none where there are no sinks");
}

TEST(Check, DropoutAndDeterministic) {
  for (const auto& [p, text] : {std::pair{-0.1, "-0.1"}, std::pair{1.0, "1"}, std::pair{1.5, "1.5"},
                                std::pair{std::nan(""), "nan"}, std::pair{double{INFINITY}, "inf"}})
    EXPECT_EQ(forward([&](Call& c) { c.options.dropout_p = p; }),
              std::string("InvalidArgument: attention: dropout_p is ") + text +
                  ", expected a probability of at least 0 and below 1");
  const Problem p = accepted([](Call& c) {
    c.options.dropout_p = 0.25;
    c.options.seed = 7;
    c.options.deterministic = true;
  });
  EXPECT_EQ(p.dropout, Dropout::of(0.25, 7));
  EXPECT_TRUE(p.deterministic);
  // Without dropout the seed is no part of the problem.
  EXPECT_EQ(accepted([](Call& c) { c.options.seed = 7; }), accepted([](Call&) {}));
}

TEST(Check, OutAndLse) {
  EXPECT_EQ(forward([](Call& c) { c.forward.out = c.forward.q; }),
            "InvalidArgument: attention: out has shape (2, 90, 8, 64), expected (2, 90, 8, 32) = (B, S_q, H_q, D_v)");
  EXPECT_EQ(forward([](Call& c) { c.forward.lse = tensor({2, 90, 8}, DType::kFloat32); }),
            "InvalidArgument: attention: lse has shape (2, 90, 8), expected (2, 8, 90) = (B, H_q, S_q)");
  EXPECT_EQ(forward([](Call& c) { c.forward.lse.dtype = DType::kFloat16; }),
            "InvalidType: attention: lse has dtype float16, expected float32");
  EXPECT_EQ(forward([](Call& c) { c.forward.lse.strides = {720, 1, 8}; }),
            "InvalidArgument: attention: lse has strides (720, 1, 8), expected a contiguous tensor");
}

TEST(Check, MaxLogits) {
  const auto with = [](TensorView max_logits, Device device = {}) {
    return forward([&](Call& c) { c.forward.max_logits = max_logits; }, device);
  };
  EXPECT_EQ(with(tensor({2, 8}, DType::kFloat32)), "accepted");
  EXPECT_EQ(with(tensor({2, 4}, DType::kFloat32)),
            "InvalidArgument: attention: max_logits has shape (2, 4), expected (2, 8) = (B, H_q)");
  EXPECT_EQ(with(tensor({2, 8})), "InvalidType: attention: max_logits has dtype float16, expected float32");
  EXPECT_EQ(with(tensor({2, 8}, DType::kFloat32), kGpu),
            "InvalidArgument: attention: max_logits is on cpu, expected cuda:0, as q");
  TensorView strided = tensor({2, 8}, DType::kFloat32);
  strided.strides = {1, 2};
  EXPECT_EQ(with(strided), "InvalidArgument: attention: max_logits has strides (1, 2), expected a contiguous tensor");
}

TEST(Check, GradientsLookLikeTheirTensors) {
  EXPECT_EQ(backward([](Call& c) { c.tensors.dq.shape[1] = 91; }),
            "InvalidArgument: attention: dq has shape (2, 91, 8, 64), expected (2, 90, 8, 64) = (B, S_q, H_q, D)");
  EXPECT_EQ(backward([](Call& c) { c.tensors.dk.dtype = DType::kFloat32; }),
            "InvalidType: attention: dk has dtype float32, expected float16, as q");
  EXPECT_EQ(backward([](Call& c) { c.tensors.dv.strides[3] = 2; }),
            "InvalidArgument: attention: dv has stride 2 in its last dimension, expected 1");
  EXPECT_EQ(backward([](Call& c) { c.tensors.dlse.shape[2] = 1; }),
            "InvalidArgument: attention: dlse has shape (2, 8, 1), expected (2, 8, 90) = (B, H_q, S_q)");
  EXPECT_EQ(backward([](Call& c) { c.tensors.dout.device = kGpu; }),
            "InvalidArgument: attention: dout is on cuda:0, expected cpu, as q");
}

TEST(Check, AlignmentOnCudaAlone) {
  const auto shift = [](Call& c) { c.forward.k.data = memory + 2; };
  EXPECT_EQ(forward(shift), "accepted");
  EXPECT_EQ(forward(shift, kGpu),
            "Unreadable: attention: k is at an address that is not a multiple of 16 bytes, expected one on CUDA");
  EXPECT_EQ(forward([](Call& c) { c.forward.q.strides[1] = 516; }, kGpu),
            "Unreadable: attention: q has strides (46080, 516, 64, 1), expected multiples of 16 bytes on CUDA");
  EXPECT_EQ(backward([](Call& c) { c.tensors.dv.strides[0] += 1; }, kGpu),
            "Unreadable: attention: dv has strides (12801, 128, 32, 1), expected multiples of 16 bytes on CUDA");
}

TEST(Check, StridesOfOneElementNeedNoAlignment) {
  EXPECT_EQ(forward(
                [](Call& c) {
                  c.forward.q = tensor({1, 90, 8, 64}, DType::kFloat16, kGpu);
                  c.forward.k = tensor({1, 100, 4, 64}, DType::kFloat16, kGpu);
                  c.forward.v = tensor({1, 100, 4, 32}, DType::kFloat16, kGpu);
                  c.forward.out = c.forward.lse = {};
                  c.forward.q.strides[0] = 3;
                },
                kGpu),
            "accepted");
}

}  // namespace
}  // namespace flashtile
