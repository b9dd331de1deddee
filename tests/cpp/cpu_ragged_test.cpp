// These tests check that the CPU backend computes each sequence of a ragged batch as if it were alone.
#include "cpu_attention.h"

namespace flashtile {
namespace {

/// This is one side of a ragged batch's sequences: their rows, and how many of these count.
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

/// Puts NaN into every row of an entry's inputs that does not count.
void poison(Attention& a, const Span& q, const Span& k) {
  for (int i = q.first + q.used; i < q.first + q.size; ++i) {
    for (Tensor* t : {&a.q, &a.dout}) t->set_row(i, NAN);
    for (int h = 0; h < a.problem.heads_q; ++h) a.dlse[a.lse_at(0, h, i)] = NAN;
  }
  for (int j = k.first + k.used; j < k.first + k.size; ++j)
    for (Tensor* t : {&a.k, &a.v}) t->set_row(j, NAN);
}

/// Does the same to the forward's results.
void poison_results(Attention& a, const Span& q) {
  for (int i = q.first + q.used; i < q.first + q.size; ++i) {
    a.out.set_row(i, NAN);
    for (int h = 0; h < a.problem.heads_q; ++h) a.lse[a.lse_at(0, h, i)] = NAN;
  }
}

/// Copies rows [first, …) of `from` to entry `batch` of `to`.
void copy_rows(Tensor& to, int batch, const Tensor& from, int first) {
  const auto& shape = to.layout().shape;
  for (int s = 0; s < shape[1]; ++s)
    for (int h = 0; h < shape[2]; ++h)
      for (int d = 0; d < shape[3]; ++d) to.set(batch, s, h, d, from.get(0, first + s, h, d));
}

/// Returns the sequence alone, as an entry of a dense batch of its length. The entry keeps its index, by which dropout
/// and slopes go.
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

/// Expects equality bit for bit, and 0 in rows that do not count.
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
    for (int h = 0; h < a.problem.heads_q; ++h) {
      const std::size_t head = static_cast<std::size_t>(b) * a.problem.heads_q + h;
      ASSERT_EQ(forward.largest[head], one.largest[head]) << "largest[" << b << ", " << h << "]";
    }
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
    for (const Band band : {Band::full(), Band::causal(), Band{7, 3}, Band{30, -9}, Band{-9, 30}}) {
      for (const int threads : {1, 3}) {
        Attention a = ragged(problem_of(dtype, 0, 0, 24, 16, band), kQueries, kKeys);
        a.tile = threads == 1 ? 32 : 128;  // 128 is wider than most sequences
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

/// Returns a view (T, H, D) without gaps.
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
    if (ragged) {  // from (H_q, T_q) to (B, H_q, S_q)
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
