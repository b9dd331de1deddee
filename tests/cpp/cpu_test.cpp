// The CPU backend against attention written out in double precision, on every instruction set that this machine has,
// and the laws that hold bit for bit.
#include "cpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "flashtile/flashtile.h"
#include "flashtile/math/state.h"

namespace flashtile {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

/// A value that the dtype holds exactly, NaN or infinity, as its bits.
std::uint16_t encode16(DType dtype, float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (dtype == DType::kBFloat16) return static_cast<std::uint16_t>(bits >> 16);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  if (x == 0) return static_cast<std::uint16_t>(sign);
  if (!std::isfinite(x)) return static_cast<std::uint16_t>(sign | 0x7c00u | (std::isnan(x) ? 0x200u : 0));
  return static_cast<std::uint16_t>(sign | (((bits & 0x7fffffffu) - 0x38000000u) >> 13));
}

float decode16(DType dtype, std::uint16_t x) {
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(std::uint32_t{x} << 16);
  const int exponent = x >> 10 & 31, mantissa = x & 0x3ff;
  const float sign = x & 0x8000u ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * kInfinity;
  return sign * (exponent == 0 ? std::ldexp(float(mantissa), -24) : std::ldexp(float(mantissa + 1024), exponent - 25));
}

/// A (B, S, H, D) tensor whose heads and rows lie apart: the gaps keep what they held.
class Tensor {
 public:
  Tensor(DType dtype, int batch, int rows, int heads, int width) : width_(width) {
    view_.dtype = dtype;
    view_.rank = 4;
    view_.shape = {batch, rows, heads, width};
    view_.strides[3] = 1;
    view_.strides[1] = width + 3;
    view_.strides[2] = rows * view_.strides[1] + 5;
    const std::int64_t entry = heads * view_.strides[2];
    view_.strides[0] = batch == 1 ? 0 : entry;  // as with_batch() has it
    bytes_.assign(static_cast<std::size_t>(batch * entry + 1) * bytes_of(dtype), 0xa5);
  }

  TensorView view() {
    TensorView view = view_;
    view.data = bytes_.data();
    return view;
  }
  const TensorView& layout() const { return view_; }
  int width() const { return width_; }
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

  float get(int b, int s, int h, int d) const {
    const std::uint8_t* const p = bytes_.data() + at(b, s, h, d);
    if (view_.dtype == DType::kFloat32) {
      float x;
      std::memcpy(&x, p, 4);
      return x;
    }
    std::uint16_t bits;
    std::memcpy(&bits, p, 2);
    return decode16(view_.dtype, bits);
  }
  void set(int b, int s, int h, int d, float x) {
    if (view_.dtype == DType::kFloat32) {
      std::memcpy(bytes_.data() + at(b, s, h, d), &x, 4);
    } else {
      const std::uint16_t bits = encode16(view_.dtype, x);
      std::memcpy(bytes_.data() + at(b, s, h, d), &bits, 2);
    }
  }
  void set_row(int s, float x) {
    for (int b = 0; b < view_.shape[0]; ++b)
      for (int h = 0; h < view_.shape[2]; ++h)
        for (int d = 0; d < width_; ++d) set(b, s, h, d, x);
  }
  /// Multiples of 1/8, which every dtype holds.
  void fill(std::mt19937& random) {
    std::uniform_int_distribution<int> eighths(-12, 12);
    for (int s = 0; s < view_.shape[1]; ++s)
      for (int b = 0; b < view_.shape[0]; ++b)
        for (int h = 0; h < view_.shape[2]; ++h)
          for (int d = 0; d < width_; ++d) set(b, s, h, d, static_cast<float>(eighths(random)) / 8);
  }

 private:
  std::size_t at(int b, int s, int h, int d) const {
    return static_cast<std::size_t>(b * view_.strides[0] + s * view_.strides[1] + h * view_.strides[2] + d) *
           bytes_of(view_.dtype);
  }

  TensorView view_;  // its data stays null: copies have their own bytes
  int width_;
  std::vector<std::uint8_t> bytes_;
};

TensorView flat_view(std::vector<float>& values, std::initializer_list<std::int64_t> shape) {
  TensorView view;
  view.data = values.data();
  view.dtype = DType::kFloat32;
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

/// One attention call with its inputs, outputs and gradients.
struct Attention {
  explicit Attention(const Problem& p, unsigned seed = 1)
      : problem(p),
        q(p.dtype, p.ragged ? 1 : p.batch, p.seqlen_q, p.heads_q, p.head_dim),
        k(p.dtype, p.ragged ? 1 : p.batch, p.seqlen_k, p.heads_k, p.head_dim),
        v(p.dtype, p.ragged ? 1 : p.batch, p.seqlen_k, p.heads_k, p.head_dim_v),
        dout(p.dtype, p.ragged ? 1 : p.batch, p.seqlen_q, p.heads_q, p.head_dim_v),
        out(dout),
        dq(q),
        dk(k),
        dv(v),
        lse(static_cast<std::size_t>(p.ragged ? 1 : p.batch) * p.heads_q * p.seqlen_q, 7.0f),
        dlse(lse),
        slopes(static_cast<std::size_t>(p.heads_q)),
        sinks(slopes),
        dsinks(p.heads_q, 7.0f) {
    std::mt19937 random(seed);
    for (Tensor* t : {&q, &k, &v, &dout}) t->fill(random);
    for (float& x : dlse) x = static_cast<float>(random() % 17) / 8 - 1;
    for (float& x : slopes) x = static_cast<float>(random() % 8) / 16;
    for (float& x : sinks) x = static_cast<float>(random() % 17) / 8 - 1;
  }

  ForwardTensors forward_tensors() {
    const Problem& p = problem;
    ForwardTensors t{.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view()};
    t.lse = flat_view(lse, {p.batch, p.heads_q, p.seqlen_q});
    if (p.alibi) t.alibi_slopes = flat_view(slopes, {p.heads_q});
    if (p.alibi && slopes_per_batch) t.alibi_slopes = flat_view(slopes, {p.batch, p.heads_q});
    if (p.sinks) t.sinks = flat_view(sinks, {p.heads_q});
    t.cu_seqlens_q.data = p.ragged ? begins_q.data() : nullptr;
    t.cu_seqlens_k.data = p.ragged ? begins_k.data() : nullptr;
    t.seqused_q.data = used_q.empty() ? nullptr : used_q.data();
    t.seqused_k.data = used_k.empty() ? nullptr : used_k.data();
    return t;
  }

  void run(int threads, bool with_dq = true, bool with_dk = true, bool with_dv = true, bool with_dsinks = true) {
    run_forward(threads);
    run_backward(threads, with_dq, with_dk, with_dv, with_dsinks);
  }

  void run_forward(int threads) {
    ForwardPlan plan;
    plan.problem = problem;
    plan.variant = variant();
    plan.grid = threads;
    std::vector<std::byte> workspace(cpu::forward_workspace_bytes(problem, plan.variant, threads), kUndefined);
    cpu::run_forward(plan, forward_tensors(), workspace.data(), nullptr);
  }

  void run_backward(int threads, bool with_dq = true, bool with_dk = true, bool with_dv = true,
                    bool with_dsinks = true) {
    BackwardPlan plan;
    plan.problem = problem;
    plan.variant = variant();
    plan.grid = threads;
    std::vector<std::byte> workspace(cpu::backward_workspace_bytes(problem, plan.variant, threads), kUndefined);
    BackwardTensors t{.forward = forward_tensors(), .dout = dout.view()};
    t.dlse = flat_view(dlse, {problem.batch, problem.heads_q, problem.seqlen_q});
    if (with_dq) t.dq = dq.view();
    if (with_dk) t.dk = dk.view();
    if (with_dv) t.dv = dv.view();
    if (with_dsinks && problem.sinks) t.dsinks = flat_view(dsinks, {problem.heads_q});
    cpu::run_backward(plan, t, workspace.data(), nullptr);
  }

  Variant variant() const { return {Arch::kCpu, problem.dtype, 256, tile, tile, 1, 1}; }

  std::size_t lse_at(int b, int h, int i) const {
    return (static_cast<std::size_t>(b) * problem.heads_q + h) * problem.seqlen_q + i;  // ragged: b = 0, i of all rows
  }

  Problem problem;
  Tensor q, k, v, dout, out, dq, dk, dv;
  std::vector<float> lse, dlse, slopes, sinks, dsinks;
  bool slopes_per_batch = false;
  int tile = 32;                                        // rows and keys
  std::vector<int> begins_q, begins_k, used_q, used_k;  // of a ragged batch

 private:
  static constexpr std::byte kUndefined{0xff};  // NaN
};

/// The result in double precision, laid out as (B, S, H, D) without gaps.
struct Expected {
  std::vector<double> out, lse, dq, dk, dv, dsinks;
};

double dot(const Tensor& a, int i, int head_a, const Tensor& b, int j, int head_b, int batch) {
  double sum = 0;
  for (int d = 0; d < a.width(); ++d) sum += double(a.get(batch, i, head_a, d)) * b.get(batch, j, head_b, d);
  return sum;
}

/// The contract written out for one row: logits, probabilities, gradients.
void expect_row(const Attention& a, int b, int h, int i, Expected& e) {
  const Problem& p = a.problem;
  const int hk = h / p.group();
  std::vector<double> logit(p.seqlen_k, kMinusInfinity), slope(p.seqlen_k, 1.0);
  double top = kMinusInfinity, sum = 0;
  for (int j = 0; j < p.seqlen_k; ++j) {
    const int distance = j - (i + p.seqlen_k - p.seqlen_q);
    if (distance < -p.band.left || distance > p.band.right) continue;
    double s = p.scale * dot(a.q, i, h, a.k, j, hk, b);
    if (p.softcap > 0) {
      const double t = std::tanh(s / p.softcap);
      s = p.softcap * t;
      slope[j] = 1 - t * t;
    }
    logit[j] = s - (p.alibi ? a.slopes[h] * std::abs(distance) : 0.0);
    top = std::max(top, logit[j]);
  }
  if (p.sinks) top = std::max(top, double{a.sinks[h]});
  for (const double s : logit) sum += s == kMinusInfinity ? 0 : std::exp(s - top);
  if (p.sinks) sum += std::exp(a.sinks[h] - top);
  const double lse = sum > 0 ? top + std::log(sum) : kMinusInfinity;
  e.lse[a.lse_at(b, h, i)] = lse;
  if (sum == 0) return;
  const auto at = [&](int rows, int heads, int row, int head, int width) {
    return ((static_cast<std::size_t>(b) * rows + row) * heads + head) * width;
  };
  const std::size_t row = at(p.seqlen_q, p.heads_q, i, h, p.head_dim),
                    row_v = at(p.seqlen_q, p.heads_q, i, h, p.head_dim_v);
  const auto factor = [&](int j) {  // of dropout
    if (!p.dropout.active()) return 1.0;
    return p.dropout.keeps(b, h, i, j) ? double{p.dropout.scale} : 0.0;
  };
  double delta = -a.dlse[a.lse_at(b, h, i)];
  for (int j = 0; j < p.seqlen_k; ++j) {
    const double probability = std::exp(logit[j] - lse) * factor(j);
    const std::size_t key_v = at(p.seqlen_k, p.heads_k, j, hk, p.head_dim_v);
    for (int d = 0; d < p.head_dim_v; ++d) {
      e.out[row_v + d] += probability * a.v.get(b, j, hk, d);
      e.dv[key_v + d] += probability * a.dout.get(b, i, h, d);
    }
    delta += probability * dot(a.dout, i, h, a.v, j, hk, b);
  }
  if (p.sinks) e.dsinks[h] -= std::exp(a.sinks[h] - lse) * delta;
  for (int j = 0; j < p.seqlen_k; ++j) {
    const double dp = dot(a.dout, i, h, a.v, j, hk, b) * factor(j);
    const double ds = std::exp(logit[j] - lse) * (dp - delta) * slope[j] * p.scale;
    const std::size_t key = at(p.seqlen_k, p.heads_k, j, hk, p.head_dim);
    for (int d = 0; d < p.head_dim; ++d) {
      e.dq[row + d] += ds * a.k.get(b, j, hk, d);
      e.dk[key + d] += ds * a.q.get(b, i, h, d);
    }
  }
}

Expected expect(const Attention& a) {
  const Problem& p = a.problem;
  const std::size_t rows_q = static_cast<std::size_t>(p.batch) * p.seqlen_q * p.heads_q;
  const std::size_t rows_k = static_cast<std::size_t>(p.batch) * p.seqlen_k * p.heads_k;
  Expected e;
  e.out.resize(rows_q * p.head_dim_v);
  e.lse.resize(rows_q);
  e.dq.resize(rows_q * p.head_dim);
  e.dk.resize(rows_k * p.head_dim);
  e.dv.resize(rows_k * p.head_dim_v);
  e.dsinks.resize(p.heads_q);
  for (int b = 0; b < p.batch; ++b)
    for (int h = 0; h < p.heads_q; ++h)
      for (int i = 0; i < p.seqlen_q; ++i) expect_row(a, b, h, i, e);
  return e;
}

void compare(const char* name, const Tensor& found, const std::vector<double>& expected, double tolerance) {
  const auto& shape = found.layout().shape;
  double largest = 1;
  for (const double x : expected) largest = std::max(largest, std::abs(x));
  std::size_t at = 0;
  for (int b = 0; b < shape[0]; ++b)
    for (int s = 0; s < shape[1]; ++s)
      for (int h = 0; h < shape[2]; ++h)
        for (int d = 0; d < shape[3]; ++d, ++at)
          ASSERT_NEAR(found.get(b, s, h, d), expected[at], tolerance * largest)
              << name << "[" << b << ", " << s << ", " << h << ", " << d << "]";
}

Problem problem_of(DType dtype, int seqlen_q, int seqlen_k, int head_dim, int head_dim_v, Band band = Band::full()) {
  Problem p;
  p.batch = 2;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.heads_q = 4;
  p.heads_k = 2;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  p.dtype = dtype;
  p.band = band;
  p.scale = 0.25f;
  return p;
}

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

/// Runs `body` once for each instruction set of this machine.
template <class Body>
void on_every_instruction_set(const Body& body) {
  const cpu::InstructionSet usual = cpu::instruction_set();
  for (const cpu::InstructionSet set : cpu::instruction_sets()) {
    SCOPED_TRACE(cpu::name_of(set));
    cpu::use_instruction_set(set);
    body();
  }
  cpu::use_instruction_set(usual);
}

template <class Body>
void on_every_kernel(const Body& body) {
  for (const DType dtype : kDTypes) {
    SCOPED_TRACE(name_of(dtype));
    on_every_instruction_set([&] { body(dtype); });
  }
}

void compare(const Attention& a, const Expected& e) {
  // Half an ulp of the output, and for bfloat16 that of the probabilities, which are rounded before a matmul.
  const DType dtype = a.problem.dtype;
  const double tolerance = dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kFloat16 ? 1e-3 : 8e-3;
  compare("out", a.out, e.out, tolerance);
  compare("dq", a.dq, e.dq, tolerance);
  compare("dk", a.dk, e.dk, tolerance);
  compare("dv", a.dv, e.dv, tolerance);
  for (int h = 0; a.problem.sinks && h < a.problem.heads_q; ++h) {
    ASSERT_NEAR(a.dsinks[h], e.dsinks[h], tolerance * std::max(1.0, std::abs(e.dsinks[h]))) << "dsinks[" << h << "]";
  }
  for (std::size_t i = 0; i < e.lse.size(); ++i) {
    if (e.lse[i] == kMinusInfinity) {
      ASSERT_EQ(a.lse[i], -kInfinity);
    } else {
      ASSERT_NEAR(a.lse[i], e.lse[i], 1e-5 * (1 + std::abs(e.lse[i])));
    }
  }
}

void expect_close(const Problem& p) {
  SCOPED_TRACE(name_of(p.dtype));
  Attention a(p);
  const Expected e = expect(a);
  on_every_instruction_set([&] {
    a.run(2);
    compare(a, e);
  });
}

TEST(Cpu, MatchesDoublePrecisionForEveryMask) {
  for (const DType dtype : kDTypes) {
    for (const Band band :
         {Band::full(), Band::causal(), Band{7, 3}, Band{0, 0}, Band{Band::kUnbounded, 5}, Band{3, 40}})
      for (const auto& [seqlen_q, seqlen_k] : {std::pair{33, 70}, std::pair{70, 33}, std::pair{65, 65}})
        expect_close(problem_of(dtype, seqlen_q, seqlen_k, 40, 24, band));
  }
}

TEST(Cpu, MatchesDoublePrecisionForEveryScoreMap) {
  for (const DType dtype : kDTypes) {
    for (const float scale : {0.25f, 0.0f, -0.25f})
      for (const float softcap : {0.0f, 2.0f})
        for (const bool alibi : {false, true}) {
          Problem p = problem_of(dtype, 37, 41, 16, 16, Band::causal());
          p.scale = scale;
          p.softcap = softcap;
          p.alibi = alibi;
          expect_close(p);
        }
  }
}

TEST(Cpu, MatchesDoublePrecisionWithSinksAndDropout) {
  for (const DType dtype : kDTypes) {
    for (const bool sinks : {false, true})
      for (const double dropout_p : {0.0, 0.3})
        for (const Band band : {Band::full(), Band::causal(), Band{7, 3}})
          // Rows that see nothing, and two tiles a side with ends within a square of 16.
          for (const auto& [seqlen_q, seqlen_k] : {std::pair{37, 9}, std::pair{41, 53}}) {
            Problem p = problem_of(dtype, seqlen_q, seqlen_k, 24, 16, band);
            p.sinks = sinks;
            p.dropout = Dropout::of(dropout_p, 0x123456789abcdef0);
            p.softcap = 4;
            expect_close(p);
          }
  }
}

TEST(Cpu, MatchesDoublePrecisionForEveryWidth) {
  for (const DType dtype : kDTypes) {
    for (const auto& [head_dim, head_dim_v] :
         {std::pair{8, 8}, std::pair{72, 136}, std::pair{104, 8}, std::pair{256, 256}})
      expect_close(problem_of(dtype, 9, 35, head_dim, head_dim_v));
  }
}

TEST(Cpu, EmptyAndSingleSequences) {
  for (const DType dtype : kDTypes) {
    for (const int seqlen_q : {0, 1})
      for (const int seqlen_k : {0, 1, 34}) expect_close(problem_of(dtype, seqlen_q, seqlen_k, 16, 8, Band::causal()));
    expect_close(problem_of(dtype, 34, 0, 16, 8));
  }
}

TEST(Cpu, ThreadsChangeNothing) {
  on_every_kernel([](DType dtype) {
    // One KV head for many threads takes the two-pass backward, one thread the fused one.
    for (const int heads_k : {1, 4}) {
      Problem p = problem_of(dtype, 150, 170, 64, 64, Band::causal());
      p.batch = 1;
      p.heads_k = heads_k;
      p.sinks = true;
      p.dropout = Dropout::of(0.1, 3);
      Attention one(p), many(p);
      one.run(1);
      many.run(5);
      EXPECT_EQ(one.out.bytes(), many.out.bytes());
      EXPECT_EQ(one.lse, many.lse);
      EXPECT_EQ(one.dq.bytes(), many.dq.bytes());
      EXPECT_EQ(one.dk.bytes(), many.dk.bytes());
      EXPECT_EQ(one.dv.bytes(), many.dv.bytes());
      EXPECT_EQ(one.dsinks, many.dsinks);
    }
  });
}

TEST(Cpu, OnlyWantedGradientsAreWrittenAndNoGaps) {
  on_every_kernel([](DType dtype) {
    Problem p = problem_of(dtype, 40, 50, 24, 16, Band{20, 5});
    p.sinks = true;
    const Attention untouched(p);
    Attention all(p);
    all.run(2);
    for (int wanted = 0; wanted < 16; ++wanted) {
      Attention some(p);
      some.run(2, wanted & 1, wanted & 2, wanted & 4, wanted & 8);
      EXPECT_EQ(some.dq.bytes(), (wanted & 1 ? all : untouched).dq.bytes());
      EXPECT_EQ(some.dk.bytes(), (wanted & 2 ? all : untouched).dk.bytes());
      EXPECT_EQ(some.dv.bytes(), (wanted & 4 ? all : untouched).dv.bytes());
      EXPECT_EQ(some.dsinks, (wanted & 8 ? all : untouched).dsinks);
    }
    // The bytes between the rows of a head are the last of each row's stride.
    const auto& strides = all.out.layout().strides;
    for (int i = p.head_dim_v * bytes_of(dtype); i < strides[1] * bytes_of(dtype); ++i) {
      EXPECT_EQ(all.out.bytes()[i], untouched.out.bytes()[i]);
    }
  });
}

TEST(Cpu, WhatARowDoesNotSeeChangesNothingForIt) {
  on_every_kernel([](DType dtype) {
    const Problem p = problem_of(dtype, 70, 75, 24, 40, Band::causal());
    constexpr int kPoisoned = 41;  // this key, and the query on its diagonal
    for (const float poison : {NAN, kInfinity, -kInfinity}) {
      Attention clean(p), keys(p), queries(p);
      clean.run(2);
      keys.k.set_row(kPoisoned, poison);
      keys.v.set_row(kPoisoned, poison);
      keys.run(2);
      const int query = kPoisoned - (p.seqlen_k - p.seqlen_q);
      queries.q.set_row(query, poison);
      queries.dout.set_row(query, poison);
      queries.run(2);
      for (int d = 0; d < p.head_dim; ++d) {
        for (int i = 0; i < query; ++i) {
          ASSERT_EQ(keys.dq.get(0, i, 1, d), clean.dq.get(0, i, 1, d)) << i;
          ASSERT_EQ(keys.out.get(0, i, 1, d), clean.out.get(0, i, 1, d)) << i;
        }
        ASSERT_TRUE(std::isnan(keys.out.get(0, query, 1, d)));
        ASSERT_TRUE(std::isnan(queries.dk.get(0, kPoisoned, 1, d)));
        for (int j = kPoisoned + 1; j < p.seqlen_k; ++j) {
          ASSERT_EQ(queries.dk.get(0, j, 1, d), clean.dk.get(0, j, 1, d)) << j;
          ASSERT_EQ(queries.dv.get(0, j, 1, d), clean.dv.get(0, j, 1, d)) << j;
        }
        for (int i = 0; i < p.seqlen_q; ++i) {
          if (i == query) continue;
          ASSERT_EQ(queries.dq.get(0, i, 1, d), clean.dq.get(0, i, 1, d)) << i;
          ASSERT_EQ(queries.out.get(0, i, 1, d), clean.out.get(0, i, 1, d)) << i;
        }
      }
    }
  });
}

/// Sequences of a ragged batch: what they hold, and how much of it counts.
struct Side {
  std::vector<int> sizes, used;
  int behind = 0;  // rows after the last sequence

  int rows() const { return std::accumulate(sizes.begin(), sizes.end(), behind); }
  std::vector<int> begins() const {
    std::vector<int> begins{0};
    for (const int size : sizes) begins.push_back(begins.back() + size);
    return begins;
  }
};

Attention ragged(Problem p, const Side& q, const Side& k) {
  p.ragged = true;
  p.batch = static_cast<int>(q.sizes.size());
  p.seqlen_q = q.rows();
  p.seqlen_k = k.rows();
  Attention a(p);
  a.begins_q = q.begins();
  a.begins_k = k.begins();
  a.used_q = q.used;
  a.used_k = k.used;
  return a;
}

/// NaN in every row of an entry's inputs that does not count.
void poison(Attention& a, const Span& q, const Span& k) {
  for (int i = q.first + q.used; i < q.first + q.size; ++i) {
    for (Tensor* t : {&a.q, &a.dout}) t->set_row(i, NAN);
    for (int h = 0; h < a.problem.heads_q; ++h) a.dlse[a.lse_at(0, h, i)] = NAN;
  }
  for (int j = k.first + k.used; j < k.first + k.size; ++j)
    for (Tensor* t : {&a.k, &a.v}) t->set_row(j, NAN);
}

/// The same of what the forward left.
void poison_results(Attention& a, const Span& q) {
  for (int i = q.first + q.used; i < q.first + q.size; ++i) {
    a.out.set_row(i, NAN);
    for (int h = 0; h < a.problem.heads_q; ++h) a.lse[a.lse_at(0, h, i)] = NAN;
  }
}

/// Entry `batch` of `to` becomes rows [first, …) of `from`.
void copy_rows(Tensor& to, int batch, const Tensor& from, int first) {
  const auto& shape = to.layout().shape;
  for (int s = 0; s < shape[1]; ++s)
    for (int h = 0; h < shape[2]; ++h)
      for (int d = 0; d < shape[3]; ++d) to.set(batch, s, h, d, from.get(0, first + s, h, d));
}

/// The sequence alone: the entry of a dense batch of its length, with the same index, which dropout and slopes go by.
Attention alone(const Attention& a, int batch, const Sequence& rows) {
  Problem p = a.problem;
  p.ragged = false;
  p.batch = batch + 1;
  p.seqlen_q = rows.q.used;
  p.seqlen_k = rows.k.used;
  Attention one(p);
  for (const auto& [to, from, first] :
       {std::tuple{&one.q, &a.q, rows.q.first}, std::tuple{&one.dout, &a.dout, rows.q.first},
        std::tuple{&one.k, &a.k, rows.k.first}, std::tuple{&one.v, &a.v, rows.k.first}})
    copy_rows(*to, batch, *from, first);
  for (int h = 0; h < p.heads_q; ++h)
    for (int i = 0; i < p.seqlen_q; ++i) one.dlse[one.lse_at(batch, h, i)] = a.dlse[a.lse_at(0, h, rows.q.first + i)];
  one.tile = a.tile;
  one.slopes = a.slopes;
  one.slopes_per_batch = a.slopes_per_batch;
  one.sinks = a.sinks;
  return one;
}

/// Bit for bit; 0 in rows that do not count.
void expect_rows(const char* name, const Tensor& found, const Span& span, const Tensor& expected, int batch) {
  const auto& shape = found.layout().shape;
  for (int s = 0; s < span.size; ++s)
    for (int h = 0; h < shape[2]; ++h)
      for (int d = 0; d < shape[3]; ++d)
        ASSERT_EQ(std::bit_cast<std::uint32_t>(found.get(0, span.first + s, h, d)),
                  std::bit_cast<std::uint32_t>(s < span.used ? expected.get(batch, s, h, d) : 0.0f))
            << name << "[" << batch << ", " << s << ", " << h << ", " << d << "]";
}

void expect_each_alone(Attention& a, int threads) {
  const Sequences sequences = a.problem.sequences(a.forward_tensors());
  for (int b = 0; b < a.problem.batch; ++b) poison(a, sequences.q.at(b), sequences.k.at(b));
  a.run_forward(threads);
  const Attention forward = a;
  for (int b = 0; b < a.problem.batch; ++b) poison_results(a, sequences.q.at(b));
  a.run_backward(threads);
  for (int b = 0; b < a.problem.batch; ++b) {
    const Sequence rows = sequences.at(b);
    Attention one = alone(a, b, rows);
    one.run(1);
    expect_rows("out", forward.out, rows.q, one.out, b);
    expect_rows("dq", a.dq, rows.q, one.dq, b);
    expect_rows("dk", a.dk, rows.k, one.dk, b);
    expect_rows("dv", a.dv, rows.k, one.dv, b);
    for (int h = 0; h < a.problem.heads_q; ++h)
      for (int i = 0; i < rows.q.size; ++i)
        ASSERT_EQ(forward.lse[a.lse_at(0, h, rows.q.first + i)],
                  i < rows.q.used ? one.lse[one.lse_at(b, h, i)] : -kInfinity)
            << "lse[" << b << ", " << h << ", " << i << "]";
  }
}

const Side kQueries{{33, 0, 1, 170, 5, 0, 64, 40}, {}, 0}, kKeys{{33, 40, 7, 90, 0, 0, 130, 12}, {}, 0};

TEST(CpuRagged, EachSequenceIsAsIfAlone) {
  on_every_kernel([](DType dtype) {
    for (const Band band : {Band::full(), Band::causal(), Band{7, 3}}) {
      for (const int threads : {1, 3}) {
        Attention a = ragged(problem_of(dtype, 0, 0, 24, 16, band), kQueries, kKeys);
        a.tile = threads == 1 ? 32 : 128;  // the latter wider than most sequences
        expect_each_alone(a, threads);
      }
    }
  });
}

TEST(CpuRagged, EachSequenceIsAsIfAloneWithEveryOption) {
  on_every_kernel([](DType dtype) {
    Problem p = problem_of(dtype, 0, 0, 16, 24, Band::causal());
    p.alibi = p.sinks = true;
    p.softcap = 3;
    p.dropout = Dropout::of(0.2, 5);
    Attention a = ragged(p, kQueries, kKeys);
    a.slopes_per_batch = true;
    for (int i = 0; i < a.problem.batch * p.heads_q; ++i) a.slopes.push_back(static_cast<float>(i % 7) / 16);
    for (const int tile : {32, 128}) {
      a.tile = tile;
      expect_each_alone(a, 2);
    }
  });
}

TEST(CpuRagged, RowsThatDoNotCountAreNeverReadAndBecomeZero) {
  on_every_kernel([](DType dtype) {
    const Side q{kQueries.sizes, {20, 0, 0, 100, 5, 0, 1, 32}, 45};
    const Side k{kKeys.sizes, {33, 17, 7, 65, 0, 0, 1, 0}, 70};
    for (const int threads : {1, 4}) {
      Attention a = ragged(problem_of(dtype, 0, 0, 24, 16, Band::causal()), q, k);
      a.tile = threads == 1 ? 32 : 96;
      expect_each_alone(a, threads);
      Attention all_of_them = ragged(problem_of(dtype, 0, 0, 24, 16), {q.sizes, {}, q.behind}, {k.sizes, {}, k.behind});
      expect_each_alone(all_of_them, threads);
    }
  });
}

TEST(CpuRagged, OneLongSequenceAmongShortOnes) {
  for (const int heads_k : {1, 2}) {
    Problem p = problem_of(DType::kFloat32, 0, 0, 16, 16, Band::causal());
    p.heads_k = heads_k;
    for (const Side& side : {Side{{3, 500, 3, 40}, {}, 0}, Side{{0, 300}, {}, 9}, Side{{100, 100, 100}, {}, 0}})
      for (const int threads : {1, 2, 7}) {
        Attention a = ragged(p, side, side);
        expect_each_alone(a, threads);
      }
  }
}

TEST(CpuRagged, OfEqualLengthsIsDense) {
  Problem p = problem_of(DType::kFloat32, 40, 50, 16, 24, Band::causal());
  p.sinks = true;
  p.dropout = Dropout::of(0.1, 3);
  Attention a = ragged(p, {{40, 40}, {}, 0}, {{50, 50}, {}, 0}), dense(p);
  for (int b = 0; b < p.batch; ++b) {
    copy_rows(dense.q, b, a.q, b * 40);
    copy_rows(dense.dout, b, a.dout, b * 40);
    copy_rows(dense.k, b, a.k, b * 50);
    copy_rows(dense.v, b, a.v, b * 50);
    for (int h = 0; h < p.heads_q; ++h)
      for (int i = 0; i < 40; ++i) dense.dlse[dense.lse_at(b, h, i)] = a.dlse[a.lse_at(0, h, b * 40 + i)];
  }
  dense.sinks = a.sinks;
  a.run(3);
  dense.run(2);
  for (int b = 0; b < p.batch; ++b) {
    expect_rows("out", a.out, {b * 40, 40, 40}, dense.out, b);
    expect_rows("dq", a.dq, {b * 40, 40, 40}, dense.dq, b);
    expect_rows("dk", a.dk, {b * 50, 50, 50}, dense.dk, b);
    expect_rows("dv", a.dv, {b * 50, 50, 50}, dense.dv, b);
  }
  EXPECT_EQ(a.dsinks, dense.dsinks);
}

/// (T, H, D) without gaps.
TensorView rows_view(std::vector<float>& values, int batch, int rows, int heads, int width, bool ragged) {
  values.resize(static_cast<std::size_t>(batch) * rows * heads * width, 7.0f);
  return ragged ? flat_view(values, {batch * rows, heads, width}) : flat_view(values, {batch, rows, heads, width});
}

TEST(CpuRagged, AWholeCallTakesTensorsWithoutABatch) {
  constexpr int kRows = 150, kHeads = 2, kWidth = 16, kBatch = 3;
  struct Results {
    std::vector<float> out, lse, dq, dk, dv;
    bool operator==(const Results&) const = default;
  };
  std::mt19937 random(1);
  std::vector<float> q(kBatch * kRows * kHeads * kWidth);
  for (float& x : q) x = static_cast<float>(random() % 17) / 8 - 1;
  std::vector<float> k = q, v = q, dout = q;
  std::reverse(k.begin(), k.end());
  std::vector<int> begins{0, kRows, 2 * kRows, 3 * kRows};
  const auto run = [&](bool ragged) {
    const auto view = [&](std::vector<float>& values) {
      return rows_view(values, kBatch, kRows, kHeads, kWidth, ragged);
    };
    Results r;
    BackwardTensors t{.forward = {.q = view(q), .k = view(k), .v = view(v), .out = view(r.out)}, .dout = view(dout)};
    r.lse.resize(std::size_t{kBatch} * kHeads * kRows);
    t.forward.lse = ragged ? flat_view(r.lse, {kHeads, kBatch * kRows}) : flat_view(r.lse, {kBatch, kHeads, kRows});
    t.dq = view(r.dq);
    t.dk = view(r.dk);
    t.dv = view(r.dv);
    if (ragged) {
      TensorView& table = t.forward.cu_seqlens_q;
      table.data = begins.data();
      table.dtype = DType::kInt32;
      table.rank = 1;
      table.shape = {kBatch + 1};
      table.strides = {1};
      t.forward.cu_seqlens_k = table;
    }
    const DeviceInfo device{.name = "a CPU", .threads = 2};
    const ForwardPlan forward = plan_forward("attention", t.forward, {.causal = true}, device);
    std::vector<std::byte> workspace(static_cast<std::size_t>(forward.workspace_bytes));
    run_forward(forward, t.forward, workspace.data(), nullptr);
    const BackwardPlan backward = plan_backward("attention", t, {.causal = true}, device);
    workspace.resize(static_cast<std::size_t>(backward.workspace_bytes));
    run_backward(backward, t, workspace.data(), nullptr);
    if (ragged) {  // (H_q, T_q) to (B, H_q, S_q)
      std::vector<float> lse(r.lse.size());
      for (int b = 0; b < kBatch; ++b)
        for (int h = 0; h < kHeads; ++h)
          std::copy_n(r.lse.begin() + (h * kBatch + b) * kRows, kRows, lse.begin() + (b * kHeads + h) * kRows);
      r.lse = lse;
    }
    return r;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(CpuRagged, NoSequences) {
  for (const int rows : {0, 40}) {
    Problem p = problem_of(DType::kBFloat16, 0, 0, 16, 16);
    p.sinks = true;
    Attention a = ragged(p, {{}, {}, rows}, {{}, {}, 2 * rows});
    const Span q{0, rows, 0}, k{0, 2 * rows, 0};
    poison(a, q, k);
    a.run(2);
    expect_rows("out", a.out, q, a.out, 0);
    expect_rows("dq", a.dq, q, a.dq, 0);
    expect_rows("dk", a.dk, k, a.dk, 0);
    expect_rows("dv", a.dv, k, a.dv, 0);
    for (const float lse : a.lse) EXPECT_EQ(lse, -kInfinity);
    for (const float dsink : a.dsinks) EXPECT_EQ(dsink, 0);
  }
}

}  // namespace
}  // namespace flashtile
