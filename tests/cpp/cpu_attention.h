// This file runs attention on the CPU backend, with tensors that have gaps, and writes out in double precision what it
// must give.
#pragma once

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
#include "views.h"

namespace flashtile {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

/// Returns the bits of a value that the dtype holds exactly, or of NaN or infinity.
inline std::uint16_t encode16(DType dtype, float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (dtype == DType::kBFloat16) return static_cast<std::uint16_t>(bits >> 16);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  if (x == 0) return static_cast<std::uint16_t>(sign);
  if (!std::isfinite(x)) return static_cast<std::uint16_t>(sign | 0x7c00u | (std::isnan(x) ? 0x200u : 0));
  return static_cast<std::uint16_t>(sign | (((bits & 0x7fffffffu) - 0x38000000u) >> 13));
}

inline float decode16(DType dtype, std::uint16_t x) {
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(std::uint32_t{x} << 16);
  const int exponent = x >> 10 & 31, mantissa = x & 0x3ff;
  const float sign = x & 0x8000u ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * kInfinity;
  return sign * (exponent == 0 ? std::ldexp(float(mantissa), -24) : std::ldexp(float(mantissa + 1024), exponent - 25));
}

/// This is a (B, S, H, D) tensor with gaps between heads and rows, which must keep what they held.
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
    view_.strides[0] = batch == 1 ? 0 : entry;  // a batch of one has stride 0, as in with_batch()
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
  /// Fills the tensor with multiples of 1/8, which every dtype holds exactly.
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

inline TensorView flat_view(std::vector<float>& values, std::initializer_list<std::int64_t> shape) {
  return contiguous(values.data(), DType::kFloat32, shape);
}

/// This is one attention call with its inputs, outputs and gradients.
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
        largest(static_cast<std::size_t>(p.batch) * p.heads_q),
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
    t.max_logits = flat_view(largest, {p.batch, p.heads_q});
    if (p.alibi) t.alibi_slopes = flat_view(slopes, {p.heads_q});
    if (p.alibi && slopes_per_batch) t.alibi_slopes = flat_view(slopes, {p.batch, p.heads_q});
    if (p.sinks) t.sinks = flat_view(sinks, {p.heads_q});
    if (p.column_masked()) t.mask = contiguous(columns.data(), DType::kInt32, {1, 1, p.seqlen_k, 4});
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
    const bool may_pack = !problem.alibi && !problem.dropout.active() && !problem.column_masked();
    plan.packed_heads = may_pack ? std::min(most_packed, problem.group()) : 1;
    std::vector<std::byte> workspace(cpu::forward_workspace_bytes(plan), kUndefined);
    std::ranges::fill(largest, -kInfinity);
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
    // In a ragged batch b is 0, and i counts all rows.
    return (static_cast<std::size_t>(b) * problem.heads_q + h) * problem.seqlen_q + i;
  }

  Problem problem;
  Tensor q, k, v, dout, out, dq, dk, dv;
  std::vector<float> lse, dlse, largest, slopes, sinks, dsinks;
  bool slopes_per_batch = false;
  int tile = 32;                                        // rows and keys of a tile
  int most_packed = 1000;                               // limit of the heads that the forward packs, where it may
  std::vector<int> begins_q, begins_k, used_q, used_k;  // of a ragged batch
  std::vector<int> columns;                             // the column mask, one for all

 private:
  static constexpr std::byte kUndefined{0xff};  // its bytes make NaN
};

/// This is the result in double precision, laid out as (B, S, H, D) without gaps.
struct Expected {
  std::vector<double> out, lse, largest, dq, dk, dv, dsinks;
};

inline double dot(const Tensor& a, int i, int head_a, const Tensor& b, int j, int head_b, int batch) {
  double sum = 0;
  for (int d = 0; d < a.width(); ++d) sum += double(a.get(batch, i, head_a, d)) * b.get(batch, j, head_b, d);
  return sum;
}

/// Computes one row as the contract says: logits, probabilities, gradients.
inline void expect_row(const Attention& a, int b, int h, int i, Expected& e) {
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
  double& largest = e.largest[static_cast<std::size_t>(b) * p.heads_q + h];
  largest = std::max(largest, top);
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
  const auto factor = [&](int j) {  // factor of dropout
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

inline Expected expect(const Attention& a) {
  const Problem& p = a.problem;
  const std::size_t rows_q = static_cast<std::size_t>(p.batch) * p.seqlen_q * p.heads_q;
  const std::size_t rows_k = static_cast<std::size_t>(p.batch) * p.seqlen_k * p.heads_k;
  Expected e;
  e.out.resize(rows_q * p.head_dim_v);
  e.lse.resize(rows_q);
  e.largest.resize(a.largest.size(), kMinusInfinity);
  e.dq.resize(rows_q * p.head_dim);
  e.dk.resize(rows_k * p.head_dim);
  e.dv.resize(rows_k * p.head_dim_v);
  e.dsinks.resize(p.heads_q);
  for (int b = 0; b < p.batch; ++b)
    for (int h = 0; h < p.heads_q; ++h)
      for (int i = 0; i < p.seqlen_q; ++i) expect_row(a, b, h, i, e);
  return e;
}

inline void compare(const char* name, const Tensor& found, const std::vector<double>& expected, double tolerance) {
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

inline Problem problem_of(DType dtype, int seqlen_q, int seqlen_k, int head_dim, int head_dim_v,
                          Band band = Band::full()) {
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

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

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

inline void compare(const std::vector<float>& found, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == kMinusInfinity) {
      ASSERT_EQ(found[i], -kInfinity);
    } else {
      ASSERT_NEAR(found[i], expected[i], 1e-5 * (1 + std::abs(expected[i])));
    }
  }
}

inline void compare(const Attention& a, const Expected& e) {
  // The tolerance is half an ulp of the output, and for bfloat16 that of the probabilities, which are rounded before a
  // matmul.
  const DType dtype = a.problem.dtype;
  const double tolerance = dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kFloat16 ? 1e-3 : 8e-3;
  compare("out", a.out, e.out, tolerance);
  compare("dq", a.dq, e.dq, tolerance);
  compare("dk", a.dk, e.dk, tolerance);
  compare("dv", a.dv, e.dv, tolerance);
  for (int h = 0; a.problem.sinks && h < a.problem.heads_q; ++h) {
    ASSERT_NEAR(a.dsinks[h], e.dsinks[h], tolerance * std::max(1.0, std::abs(e.dsinks[h]))) << "dsinks[" << h << "]";
  }
  compare(a.lse, e.lse);
  compare(a.largest, e.largest);
}

inline void expect_close(const Problem& p, int tile = 32) {
  SCOPED_TRACE(name_of(p.dtype));
  Attention a(p);
  a.tile = tile;
  const Expected e = expect(a);
  on_every_instruction_set([&] {
    a.run(2);
    compare(a, e);
  });
}

}  // namespace flashtile
