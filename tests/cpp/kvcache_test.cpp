// These tests compare attention over a cache on the CPU to the contract written out in double precision, and check the
// laws that are exact bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cpu.h"
#include "flashtile/flashtile.h"
#include "flashtile/math/state.h"
#include "views.h"

namespace flashtile {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
constexpr int kHeadsQ = 4, kHeadsK = 2, kDim = 24, kDimV = 16, kPositions = 400;

template <class T>
TensorView view_of(std::vector<T>& values, std::initializer_list<std::int64_t> shape) {
  return contiguous(values.data(), std::is_same_v<T, int> ? DType::kInt32 : DType::kFloat32, shape);
}

std::vector<float> random_floats(std::mt19937& random, std::size_t count) {
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 800;
  return values;
}

/// This is one sequence of a batch: its rows in the cache, those that are added, and its queries.
struct Request {
  int held, added, queries, pad;
  std::vector<float> k, v, k_new, v_new, q;  // (row, head, width)

  Request(std::mt19937& random, int held_rows, int added_rows, int query_rows, int padding = 0)
      : held(held_rows), added(added_rows), queries(query_rows), pad(padding) {
    k = random_floats(random, held * kHeadsK * kDim);
    v = random_floats(random, held * kHeadsK * kDimV);
    k_new = random_floats(random, added * kHeadsK * kDim);
    v_new = random_floats(random, added * kHeadsK * kDimV);
    q = random_floats(random, queries * kHeadsQ * kDim);
  }
  int end() const { return held + added; }
};

struct Setting {
  Band band = Band::causal();
  float softcap = 0;
  bool alibi = false;
  bool sinks = false;
  int rotary_dim = 0;
  bool interleaved = true;
  int page_size = 0;  // 0: contiguous
  bool ragged = false;
  bool indexed = false;
  int masked_keys = 0;  // of the column mask; 0: there is none
  int masks = 1;        // heads that it tells apart
};

/// Returns what a column mask hides, (sequence, mask, column): of each column no, one or two ranges of rows.
std::vector<HiddenRows> columns_of(std::size_t sequences, const Setting& o) {
  std::mt19937 random(7);
  std::vector<HiddenRows> columns(sequences * o.masks * o.masked_keys);
  for (HiddenRows& hidden : columns) {
    for (Range* range : {&hidden.first, &hidden.second}) {
      const int begin = static_cast<int>(random() % 12);
      if (random() % 2 == 0) *range = {begin, random() % 5 == 0 ? std::numeric_limits<int>::max() : begin + 3};
    }
  }
  return columns;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

struct Results {
  std::vector<float> out, lse;  // the sequences' results, concatenated: (row, head, width), (row, head)
  std::vector<float> k, v;      // rows of each sequence's cache after the call

  bool operator==(const Results& other) const {
    return same_bits(out, other.out) && same_bits(lse, other.lse) && same_bits(k, other.k) && same_bits(v, other.v);
  }
};

struct Tables {
  std::vector<float> cos, sin, slopes, sinks;

  explicit Tables(int rotary_dim) {
    for (int position = 0; position < kPositions; ++position) {
      for (int i = 0; i < rotary_dim / 2; ++i) {
        const double angle = position * std::pow(10000.0, -2.0 * i / rotary_dim);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    for (int h = 0; h < kHeadsQ; ++h) slopes.push_back(0.1f * static_cast<float>(h)), sinks.push_back(0.5f - h);
  }
};

/// Lays the sequences out as the options say, in a cache that is NaN elsewhere, and runs the whole call.
Results run(const std::vector<Request>& sequences, const Setting& o, unsigned seed = 1) {
  std::mt19937 random(seed);
  const int batch = static_cast<int>(sequences.size());
  int capacity = 1;
  for (const Request& s : sequences) capacity = std::max(capacity, s.end());
  const int size = o.page_size > 0 ? o.page_size : capacity + 3;
  const int of_sequence = (capacity + size - 1) / size, pages = batch * of_sequence + 2;
  std::vector<int> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  if (o.page_size > 0 || o.indexed) std::shuffle(order.begin(), order.end(), random);
  const auto place = [&](int b, int row) {
    return static_cast<std::size_t>(order[b * of_sequence + row / size] * size + row % size);
  };
  std::vector<float> k_cache(static_cast<std::size_t>(pages * size * kHeadsK * kDim), kPoison);
  std::vector<float> v_cache(static_cast<std::size_t>(pages * size * kHeadsK * kDimV), kPoison);
  std::vector<float> q, k_new, v_new;
  std::vector<int> lengths, pads, begins{0};
  for (int b = 0; b < batch; ++b) {
    const Request& s = sequences[b];
    for (int row = s.pad; row < s.held; ++row) {
      std::copy_n(&s.k[row * kHeadsK * kDim], kHeadsK * kDim, &k_cache[place(b, row) * kHeadsK * kDim]);
      std::copy_n(&s.v[row * kHeadsK * kDimV], kHeadsK * kDimV, &v_cache[place(b, row) * kHeadsK * kDimV]);
    }
    q.insert(q.end(), s.q.begin(), s.q.end());
    k_new.insert(k_new.end(), s.k_new.begin(), s.k_new.end());
    v_new.insert(v_new.end(), s.v_new.begin(), s.v_new.end());
    lengths.push_back(s.held);
    pads.push_back(s.pad);
    begins.push_back(begins.back() + s.queries);
  }
  const int rows = begins.back(), unused = o.ragged ? 2 : 0;
  q.resize(q.size() + unused * kHeadsQ * kDim, kPoison);
  const std::int64_t added = sequences[0].added;
  const bool appends = !k_new.empty();
  if (o.ragged && appends)
    k_new.resize((rows + unused) * kHeadsK * kDim), v_new.resize((rows + unused) * kHeadsK * kDimV);

  Tables tables(o.rotary_dim);
  std::vector<float> out((rows + unused) * kHeadsQ * kDimV, 7.0f), lse((rows + unused) * kHeadsQ, 7.0f);
  KvcacheTensors t;
  t.cache_seqlens = view_of(lengths, {batch});
  t.leftpad = view_of(pads, {batch});
  t.k_cache = view_of(k_cache, {pages, size, kHeadsK, kDim});
  t.v_cache = view_of(v_cache, {pages, size, kHeadsK, kDimV});
  if (o.page_size > 0) t.block_table = view_of(order, {batch, of_sequence});
  if (o.indexed) t.cache_batch_idx = view_of(order, {batch});
  if (o.ragged) {
    t.cu_seqlens_q = view_of(begins, {batch + 1});
    t.q = view_of(q, {rows + unused, kHeadsQ, kDim});
    t.out = view_of(out, {rows + unused, kHeadsQ, kDimV});
    t.lse = view_of(lse, {kHeadsQ, rows + unused});
    if (appends) t.k_new = view_of(k_new, {rows + unused, kHeadsK, kDim});
    if (appends) t.v_new = view_of(v_new, {rows + unused, kHeadsK, kDimV});
  } else {
    const std::int64_t queries = sequences[0].queries;
    t.q = view_of(q, {batch, queries, kHeadsQ, kDim});
    t.out = view_of(out, {batch, queries, kHeadsQ, kDimV});
    t.lse = view_of(lse, {batch, kHeadsQ, queries});
    if (appends) t.k_new = view_of(k_new, {batch, added, kHeadsK, kDim});
    if (appends) t.v_new = view_of(v_new, {batch, added, kHeadsK, kDimV});
  }
  if (o.rotary_dim > 0) t.rotary_cos = view_of(tables.cos, {kPositions, o.rotary_dim / 2});
  if (o.rotary_dim > 0) t.rotary_sin = view_of(tables.sin, {kPositions, o.rotary_dim / 2});
  if (o.alibi) t.alibi_slopes = view_of(tables.slopes, {kHeadsQ});
  if (o.sinks) t.sinks = view_of(tables.sinks, {kHeadsQ});

  std::vector<HiddenRows> columns = columns_of(sequences.size(), o);
  if (o.masked_keys > 0) t.mask = contiguous(columns.data(), DType::kInt32, {batch, o.masks, o.masked_keys, 4});

  KvcacheOptions options{.rotary_interleaved = o.interleaved};
  if (o.band.left < Band::kUnbounded) options.attention.window_left = o.band.left;
  if (o.band.right < Band::kUnbounded) options.attention.window_right = o.band.right;
  options.attention.softcap = o.softcap;
  const std::vector<float> q_before = q;
  const KvcachePlan plan = plan_kvcache("attention_kvcache", t, options, {.name = "a CPU", .threads = 2});
  std::vector<std::byte> workspace(static_cast<std::size_t>(plan.workspace_bytes), std::byte{0xff});
  run_kvcache(plan, t, workspace.data(), nullptr);
  EXPECT_TRUE(same_bits(q, q_before)) << "q is the caller's";

  Results results;
  for (int i = rows; i < rows + unused; ++i) {
    for (int h = 0; h < kHeadsQ; ++h) {
      EXPECT_EQ(lse[h * (rows + unused) + i], -kInfinity);
      for (int d = 0; d < kDimV; ++d) EXPECT_EQ(out[(i * kHeadsQ + h) * kDimV + d], 0);
    }
  }
  out.resize(rows * kHeadsQ * kDimV);
  results.out = out;
  for (int b = 0; b < batch; ++b) {
    const int queries = sequences[b].queries;
    for (int i = 0; i < queries; ++i)
      for (int h = 0; h < kHeadsQ; ++h)
        results.lse.push_back(o.ragged ? lse[h * (rows + unused) + begins[b] + i]
                                       : lse[(b * kHeadsQ + h) * queries + i]);
    for (int row = sequences[b].pad; row < sequences[b].end(); ++row) {
      const float* const k = &k_cache[place(b, row) * kHeadsK * kDim];
      const float* const v = &v_cache[place(b, row) * kHeadsK * kDimV];
      results.k.insert(results.k.end(), k, k + kHeadsK * kDim);
      results.v.insert(results.v.end(), v, v + kHeadsK * kDimV);
    }
  }
  // Nothing else was written.
  const auto numbers = [](const std::vector<float>& values) {
    return values.size() - std::ranges::count_if(values, [](float x) { return std::isnan(x); });
  };
  EXPECT_EQ(numbers(k_cache), results.k.size());
  EXPECT_EQ(numbers(v_cache), results.v.size());
  return results;
}

using Doubles = std::vector<double>;

Doubles rotated(Doubles row, int position, const Setting& o, const Tables& tables) {
  const int pairs = o.rotary_dim / 2;
  const Doubles before = row;
  for (int i = 0; i < pairs; ++i) {
    const int a = o.interleaved ? 2 * i : i, b = o.interleaved ? 2 * i + 1 : i + pairs;
    const int at = std::clamp(position, 0, kPositions - 1) * pairs + i;
    row[a] = before[a] * tables.cos[at] - before[b] * tables.sin[at];
    row[b] = before[a] * tables.sin[at] + before[b] * tables.cos[at];
  }
  return row;
}

/// Computes one sequence as the contract says, and appends to `out` and `lse`. `columns` are its own, (mask, column).
void expect_sequence(const Request& s, const Setting& o, const HiddenRows* columns, Doubles& out, Doubles& lse) {
  const Tables tables(o.rotary_dim);
  const auto slice = [](const std::vector<float>& values, int row, int heads, int head, int width) {
    const auto first = values.begin() + (row * heads + head) * width;
    return Doubles(first, first + width);
  };
  for (int i = 0; i < s.queries; ++i) {
    const int diagonal = s.end() - s.queries + i;
    for (int h = 0; h < kHeadsQ; ++h) {
      const int hk = h / (kHeadsQ / kHeadsK);
      const Doubles q = rotated(slice(s.q, i, kHeadsQ, h, kDim), diagonal, o, tables);
      double sum = o.sinks ? std::exp(double{tables.sinks[h]}) : 0;
      Doubles result(kDimV);
      for (int j = s.pad; j < s.end(); ++j) {
        if (j - diagonal > o.band.right || diagonal - j > o.band.left) continue;
        const int column = j - (s.end() - o.masked_keys);
        if (column >= 0 && columns[h * o.masks / kHeadsQ * o.masked_keys + column].hides(i)) continue;
        const Doubles k = j < s.held ? slice(s.k, j, kHeadsK, hk, kDim)
                                     : rotated(slice(s.k_new, j - s.held, kHeadsK, hk, kDim), j, o, tables);
        const Doubles v =
            j < s.held ? slice(s.v, j, kHeadsK, hk, kDimV) : slice(s.v_new, j - s.held, kHeadsK, hk, kDimV);
        double logit = std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / std::sqrt(kDim);
        if (o.softcap > 0) logit = o.softcap * std::tanh(logit / o.softcap);
        if (o.alibi) logit -= tables.slopes[h] * std::abs(j - diagonal);
        const double weight = std::exp(logit);
        sum += weight;
        for (int d = 0; d < kDimV; ++d) result[d] += weight * v[d];
      }
      lse.push_back(std::log(sum));
      for (const double x : result) out.push_back(sum == 0 ? 0 : x / sum);
    }
  }
}

void compare(const std::vector<float>& found, const Doubles& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (std::isinf(expected[i])) {
      ASSERT_EQ(found[i], -kInfinity) << i;
    } else {
      ASSERT_NEAR(found[i], expected[i], 2e-5) << i;
    }
  }
}

void expect_close(const std::vector<Request>& sequences, const Setting& options) {
  Doubles out, lse;
  const std::vector<HiddenRows> columns = columns_of(sequences.size(), options);
  const HiddenRows* own = columns.data();
  for (const Request& s : sequences) {
    expect_sequence(s, options, own, out, lse);
    own += options.masks * options.masked_keys;
  }
  const cpu::InstructionSet usual = cpu::instruction_set();
  for (const cpu::InstructionSet set : cpu::instruction_sets()) {
    SCOPED_TRACE(cpu::name_of(set));
    cpu::use_instruction_set(set);
    const Results found = run(sequences, options);
    compare(found.out, out);
    compare(found.lse, lse);
  }
  cpu::use_instruction_set(usual);
}

/// Returns sequences of a dense batch, each with the same number of queries and of new rows.
std::vector<Request> dense(int added, int queries, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<Request> sequences;
  for (const auto& [held, pad] : {std::pair{130, 0}, std::pair{0, 0}, std::pair{300, 37}, std::pair{5, 5}})
    sequences.emplace_back(random, held, added, queries, pad);
  return sequences;
}

/// Returns sequences of a ragged batch, which add a row for each query.
std::vector<Request> ragged(unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<Request> sequences;
  for (const auto& [held, queries] :
       {std::pair{200, 1}, std::pair{0, 150}, std::pair{17, 0}, std::pair{0, 0}, std::pair{129, 40}})
    sequences.emplace_back(random, held, queries, queries);
  return sequences;
}

TEST(KvcacheOnCpu, MatchesDoublePrecision) {
  for (const int page_size : {0, 1, 16}) {
    for (const auto& [added, queries] : {std::pair{0, 1}, std::pair{1, 1}, std::pair{7, 7}, std::pair{3, 9}}) {
      expect_close(dense(added, queries), {.page_size = page_size});
      expect_close(dense(added, queries), {.rotary_dim = 16, .page_size = page_size});
      expect_close(dense(added, queries), {.rotary_dim = 16, .interleaved = false, .page_size = page_size});
    }
    expect_close(ragged(), {.page_size = page_size, .ragged = true});
    expect_close(ragged(), {.rotary_dim = 16, .page_size = page_size, .ragged = true});
  }
  expect_close(dense(2, 2), {.rotary_dim = 16, .indexed = true});
}

TEST(KvcacheOnCpu, MatchesDoublePrecisionWithEveryOption) {
  for (const Band band :
       {Band::causal(), Band::full(), Band{20, 0}, Band{7, 3}, Band{30, -9}, Band{-1, 2}, Band{Band::kUnbounded, -3}}) {
    for (const float softcap : {0.0f, 2.0f}) {
      expect_close(dense(4, 4), {.band = band, .softcap = softcap, .alibi = true, .page_size = 16});
      expect_close(dense(4, 4), {.band = band, .softcap = softcap, .sinks = true, .page_size = 16});
      expect_close(ragged(), {.band = band, .softcap = softcap, .alibi = true, .sinks = true, .ragged = true});
    }
  }
}

TEST(KvcacheOnCpu, MatchesDoublePrecisionUnderColumnMasks) {
  for (const int masked_keys : {1, 9, 40, 150, 1000}) {
    for (const int masks : {1, kHeadsK, kHeadsQ}) {
      expect_close(dense(5, 9), {.page_size = 16, .masked_keys = masked_keys, .masks = masks});
      expect_close(dense(5, 9), {.band = Band::full(), .sinks = true, .masked_keys = masked_keys, .masks = masks});
      expect_close(ragged(), {.alibi = true, .ragged = true, .masked_keys = masked_keys, .masks = masks});
    }
  }
}

TEST(KvcacheOnCpu, WherePagesLieMakesNoDifference) {
  for (const int rotary_dim : {0, 16}) {
    const Results contiguous = run(dense(5, 5), {.rotary_dim = rotary_dim});
    EXPECT_EQ(run(dense(5, 5), {.rotary_dim = rotary_dim, .indexed = true}), contiguous);
    for (const int page_size : {1, 3, 16, 128, 1000})
      for (const unsigned seed : {1u, 2u})
        EXPECT_EQ(run(dense(5, 5), {.rotary_dim = rotary_dim, .page_size = page_size}, seed), contiguous);
  }
}

TEST(KvcacheOnCpu, NeighboursMakeNoDifference) {
  const Setting options{.rotary_dim = 16, .page_size = 16, .ragged = true};
  const std::vector<Request> sequences = ragged();
  Results alone;
  for (const Request& s : sequences) {
    const Results one = run({s}, options);
    alone.out.insert(alone.out.end(), one.out.begin(), one.out.end());
    alone.lse.insert(alone.lse.end(), one.lse.begin(), one.lse.end());
    alone.k.insert(alone.k.end(), one.k.begin(), one.k.end());
    alone.v.insert(alone.v.end(), one.v.begin(), one.v.end());
  }
  EXPECT_EQ(run(sequences, options), alone);
}

/// Runs a sequence whose rows are added in pieces, each with its queries.
Results in_pieces(Request s, int piece, const Setting& options) {
  Results all;
  const Request whole = s;
  for (int first = 0; first < whole.added; first += piece) {
    s.added = s.queries = std::min(piece, whole.added - first);
    const auto rows = [&](const std::vector<float>& from, int width) {
      return std::vector(from.begin() + first * width, from.begin() + (first + s.added) * width);
    };
    s.k_new = rows(whole.k_new, kHeadsK * kDim);
    s.v_new = rows(whole.v_new, kHeadsK * kDimV);
    s.q = rows(whole.q, kHeadsQ * kDim);
    const Results found = run({s}, options);
    all.out.insert(all.out.end(), found.out.begin(), found.out.end());
    all.lse.insert(all.lse.end(), found.lse.begin(), found.lse.end());
    s.k = all.k = found.k;
    s.v = all.v = found.v;
    s.held += s.added;
  }
  return all;
}

TEST(KvcacheOnCpu, PiecesMakeNoDifference) {
  std::mt19937 random(3);
  for (const Band band : {Band::causal(), Band{40, 0}}) {
    const Request s(random, 100, 260, 260);
    const Setting options{.band = band, .sinks = true, .rotary_dim = 16, .page_size = 16};
    const Results whole = run({s}, options);
    for (const int piece : {1, 7, 64, 200}) EXPECT_EQ(in_pieces(s, piece, options), whole) << piece;
  }
}

TEST(KvcacheOnCpu, NothingToDoIsLegal) {
  std::mt19937 random(4);
  Results found = run({Request(random, 20, 3, 0)}, {.page_size = 16});  // a sequence with new rows and no query
  EXPECT_EQ(found.k.size(), 23u * kHeadsK * kDim);
  EXPECT_TRUE(found.out.empty());
  found = run({Request(random, 0, 0, 3)}, {});  // a sequence whose queries see nothing
  EXPECT_EQ(found.lse, std::vector(3 * kHeadsQ, -kInfinity));
  EXPECT_EQ(found.out, std::vector(3 * kHeadsQ * kDimV, 0.0f));
}

TEST(SelectKvcache, GpusAreRefused) {
  KvcacheProblem problem;
  problem.problem = {.head_dim = 64, .head_dim_v = 64, .dtype = DType::kFloat16, .device = {DeviceType::kCuda, 0}};
  EXPECT_THROW(select_kvcache(problem, {.device = {DeviceType::kCuda, 0}}), Unsupported);
}

}  // namespace
}  // namespace flashtile
