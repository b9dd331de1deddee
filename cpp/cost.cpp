// This file counts what a problem takes at the least, whatever kernel serves it.
#include "flashtile/kvcache.h"
#include "flashtile/plan.h"

namespace flashtile {
namespace {

/// Returns Σ of min(t, limit) over 0 ≤ t < n.
constexpr std::int64_t ramp_sum(std::int64_t n, std::int64_t limit) {
  if (n <= 0) return 0;
  if (n <= limit) return n * (n - 1) / 2;
  return limit * (limit - 1) / 2 + (n - limit) * limit;
}

struct Elements {
  double q, k, v, out, rows;  // `rows` counts the elements of lse

  explicit Elements(const Problem& p) : Elements(p, p.ragged ? 1 : p.batch) {}

 private:
  Elements(const Problem& p, int batch)
      : q(count(batch, p.seqlen_q, p.heads_q, p.head_dim)),
        k(count(batch, p.seqlen_k, p.heads_k, p.head_dim)),
        v(count(batch, p.seqlen_k, p.heads_k, p.head_dim_v)),
        out(count(batch, p.seqlen_q, p.heads_q, p.head_dim_v)),
        rows(count(batch, p.seqlen_q, p.heads_q, 1)) {}

  static double count(double a, double b, double c, double d) { return a * b * c * d; }
};

/// Returns the visible pairs of all heads; those of a ragged batch as if its sequences were equally long.
double all_pairs(const Problem& p) {
  return static_cast<double>(p.dense().visible_elements()) * p.batch * p.heads_q;
}

}  // namespace

/// Row i sees the columns from clamp(i + first) to clamp(i + end), where clamp limits to [0, S_k]: the difference of
/// two clamped ramps, each summed over the rows.
std::int64_t Problem::visible_elements() const {
  const std::int64_t offset = std::int64_t{seqlen_k} - seqlen_q;
  const auto columns_before = [&](std::int64_t start) {
    return ramp_sum(start + seqlen_q, seqlen_k) - ramp_sum(start, seqlen_k);
  };
  return columns_before(offset + band.right + 1) - columns_before(offset - band.left);
}

Cost forward_cost(const Problem& p) {
  const Elements n(p);
  const double pairs = all_pairs(p);
  return {.flops = 2 * pairs * (p.head_dim + p.head_dim_v),
          .bytes = (n.q + n.k + n.v) * bytes_of(p.dtype) + n.out * bytes_of(p.fp8 ? p.out_dtype : p.dtype) +
                   n.rows * bytes_of(DType::kFloat32)};
}

Cost backward_cost(const Problem& p) {
  const Elements n(p);
  const double pairs = all_pairs(p);
  // S, dQ and dK are sums over D; dP and dV over D_v. A backward reads q, k, v, out, dout and lse, and writes dq, dk
  // and dv.
  return {.flops = 2 * pairs * (3 * p.head_dim + 2 * p.head_dim_v),
          .bytes = 2 * (n.q + n.k + n.v + n.out) * bytes_of(p.dtype) + n.rows * bytes_of(DType::kFloat32)};
}

Cost kvcache_cost(const KvcacheProblem& cache) {
  Problem p = cache.problem.dense();
  p.seqlen_k = cache.problem.seqlen_k;
  const Elements n(p);
  Cost cost = forward_cost(p);
  cost.bytes -= (n.k + n.v) * (bytes_of(p.dtype) - bytes_of(cache.stored()));
  return cost;
}

}  // namespace flashtile
