// Is it legal? Every rule of the contract about arguments stands here, and a call that keeps them all pays only for
// comparisons of integers: messages are built when one is broken.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "flashtile/flashtile.h"
#include "message.h"

namespace flashtile {
namespace {

using Size = std::int64_t;

constexpr Size kSizeLimit = Size{1} << 30;  // what mask.h can add up in an int
constexpr Size kHeadDimStep = 8;            // 16 bytes of the narrowest dtype
constexpr Size kHeadDimLimit = 256;
constexpr int kAlignment = 16;  // bytes that CUDA kernels read at a time

/// A tensor with its name and the names of its sizes: enough to refuse it.
struct Operand {
  const char* function;
  const char* name;
  const char* sizes;
  const TensorView& view;

  template <class Error = InvalidArgument>
  [[noreturn]] void refuse(const std::string& found, const std::string& expected) const {
    flashtile::refuse<Error>(function, name, found, expected);
  }
  [[noreturn]] void refuse_shape(const std::string& expected) const {
    refuse("has shape " + shape_string(view), expected);
  }

  const Operand& has_rank(int rank) const {
    if (!view.given()) refuse<InvalidType>("is missing", std::string("a tensor ") + sizes);
    if (view.rank != rank) refuse_shape(std::to_string(rank) + " dimensions = " + sizes);
    return *this;
  }

  const Operand& has_shape(std::initializer_list<Size> expected) const {
    has_rank(static_cast<int>(expected.size()));
    if (!std::equal(expected.begin(), expected.end(), view.shape.begin()))
      refuse_shape(shape_string(expected.begin(), view.rank) + " = " + sizes);
    return *this;
  }

  const Operand& has_dtype(DType dtype, const char* why = "") const {
    if (view.dtype != dtype)
      refuse<InvalidType>(std::string("has dtype ") + name_of(view.dtype), std::string(name_of(dtype)) + why);
    return *this;
  }

  const Operand& is_on(Device device) const {
    if (view.device != device) refuse("is on " + name_of(view.device), name_of(device) + ", as q");
    return *this;
  }

  /// Strides of sizes up to 1 mean nothing.
  const Operand& has_contiguous_last_dimension() const {
    const int last = view.rank - 1;
    if (view.shape[last] > 1 && view.strides[last] != 1 && !view.empty())
      refuse("has stride " + std::to_string(view.strides[last]) + " in its last dimension", "1");
    return *this;
  }

  const Operand& is_contiguous() const {
    if (!view.contiguous())
      refuse("has strides " + shape_string(view.strides.data(), view.rank), "a contiguous tensor");
    return *this;
  }

  const Operand& is_aligned() const {
    if (view.device.type != DeviceType::kCuda || view.empty()) return *this;
    if (reinterpret_cast<std::uintptr_t>(view.data) % kAlignment != 0)
      refuse<Misaligned>("is at an address that is not a multiple of 16 bytes", "one on CUDA");
    for (int i = 0; i < view.rank - 1; ++i)
      if (view.shape[i] > 1 && view.strides[i] * bytes_of(view.dtype) % kAlignment != 0)
        refuse<Misaligned>("has strides " + shape_string(view.strides.data(), view.rank),
                           "multiples of 16 bytes on CUDA");
    return *this;
  }

  /// What q, k, v, the output and their gradients have in common.
  const Operand& is_matrix_like(const TensorView& q) const {
    return has_dtype(q.dtype, ", as q").is_on(q.device).has_contiguous_last_dimension().is_aligned();
  }
};

constexpr const char* kSizesQ = "(B, S_q, H_q, D)";
constexpr const char* kSizesK = "(B, S_k, H_k, D)";
constexpr const char* kSizesV = "(B, S_k, H_k, D_v)";
constexpr const char* kSizesOut = "(B, S_q, H_q, D_v)";
constexpr const char* kSizesLse = "(B, H_q, S_q)";

void check_head_dim(const Operand& operand, const char* size_name) {
  const Size d = operand.view.shape[3];
  if (d % kHeadDimStep != 0 || d < kHeadDimStep || d > kHeadDimLimit)
    operand.refuse_shape(std::string(size_name) + " to be a multiple of 8 from 8 to 256");
}

void check_sizes(const Operand& operand) {
  for (int i = 0; i < 3; ++i)
    if (operand.view.shape[i] >= kSizeLimit)
      operand.refuse_shape(std::string("sizes ") + operand.sizes + " below 2^30");
}

void check_heads(const Operand& q, const Operand& k) {
  const Size heads_q = q.view.shape[2];
  const Size heads_k = k.view.shape[2];
  if (heads_k < 1) k.refuse_shape("at least one head");
  if (heads_q % heads_k != 0)
    q.refuse("has H_q = " + std::to_string(heads_q) + " heads",
             "a multiple of H_k = " + std::to_string(heads_k) + " of k");
}

void check_alibi_slopes(const char* function, const ForwardTensors& t) {
  const TensorView& slopes = t.alibi_slopes;
  const Operand operand{function, "alibi_slopes", slopes.rank == 2 ? "(B, H_q)" : "(H_q)", slopes};
  const Size batch = t.q.shape[0];
  const Size heads = t.q.shape[2];
  slopes.rank == 2 ? operand.has_shape({batch, heads}) : operand.has_shape({heads});
  operand.has_dtype(DType::kFloat32).is_on(t.q.device).has_contiguous_last_dimension();
}

void check_per_head(const char* function, const char* name, const TensorView& values, const TensorView& q) {
  Operand{function, name, "(H_q)", values}
      .has_shape({q.shape[2]})
      .has_dtype(DType::kFloat32)
      .is_on(q.device)
      .has_contiguous_last_dimension();
}

void check_lse(const char* function, const char* name, const TensorView& lse, const TensorView& q) {
  Operand{function, name, kSizesLse, lse}
      .has_shape({q.shape[0], q.shape[2], q.shape[1]})
      .has_dtype(DType::kFloat32)
      .is_on(q.device)
      .is_contiguous();
}

void check_out(const char* function, const char* name, const TensorView& out, const ForwardTensors& t) {
  const auto& q = t.q.shape;
  Operand{function, name, kSizesOut, out}.has_shape({q[0], q[1], q[2], t.v.shape[3]}).is_matrix_like(t.q);
}

int window_distance(const char* function, const char* side, const std::optional<Size>& distance) {
  if (!distance) return Band::kUnbounded;
  if (*distance < 0)
    refuse<InvalidArgument>(function, "window", std::string("has ") + side + " = " + std::to_string(*distance),
                            "None or a distance of at least 0");
  return static_cast<int>(std::min<Size>(*distance, Band::kUnbounded));
}

float finite(const char* function, const char* name, double value) {
  const auto narrowed = static_cast<float>(value);
  if (!std::isfinite(narrowed))
    refuse<InvalidArgument>(function, name, "is " + number_string(value), "a finite float32 number");
  return narrowed;
}

}  // namespace

Problem check_forward(const char* function, const ForwardTensors& t, const Options& options) {
  const Operand q{function, "q", kSizesQ, t.q};
  const Operand k{function, "k", kSizesK, t.k};
  const Operand v{function, "v", kSizesV, t.v};
  q.has_rank(4);
  k.has_rank(4);
  v.has_rank(4);
  if (t.q.dtype == DType::kOther)
    q.refuse<InvalidType>("has a dtype that is not supported", "float32, float16 or bfloat16");

  const auto [batch, seqlen_q, heads_q, head_dim] = t.q.shape;
  const Size seqlen_k = t.k.shape[1];
  const Size heads_k = t.k.shape[2];
  const Size head_dim_v = t.v.shape[3];
  k.has_shape({batch, seqlen_k, heads_k, head_dim});
  v.has_shape({batch, seqlen_k, heads_k, head_dim_v});
  check_sizes(q);
  check_sizes(k);
  check_heads(q, k);
  check_head_dim(q, "D");
  check_head_dim(v, "D_v");
  q.is_matrix_like(t.q);
  k.is_matrix_like(t.q);
  v.is_matrix_like(t.q);
  if (t.alibi_slopes.given()) check_alibi_slopes(function, t);
  if (t.sinks.given()) check_per_head(function, "sinks", t.sinks, t.q);
  if (t.out.given()) check_out(function, "out", t.out, t);
  if (t.lse.given()) check_lse(function, "lse", t.lse, t.q);

  Problem problem;
  problem.batch = static_cast<int>(batch);
  problem.seqlen_q = static_cast<int>(seqlen_q);
  problem.seqlen_k = static_cast<int>(seqlen_k);
  problem.heads_q = static_cast<int>(heads_q);
  problem.heads_k = static_cast<int>(heads_k);
  problem.head_dim = static_cast<int>(head_dim);
  problem.head_dim_v = static_cast<int>(head_dim_v);
  problem.dtype = t.q.dtype;
  problem.device = t.q.device;
  problem.band = {window_distance(function, "left", options.window_left),
                  window_distance(function, "right", options.window_right)};
  if (options.causal) problem.band = problem.band.intersect(Band::causal());
  problem.scale =
      options.scale ? finite(function, "scale", *options.scale) : 1.0f / std::sqrt(static_cast<float>(head_dim));
  problem.softcap = finite(function, "softcap", options.softcap);
  if (problem.softcap < 0)
    refuse<InvalidArgument>(function, "softcap", "is " + number_string(options.softcap), "a number of at least 0");
  if (!(options.dropout_p >= 0 && options.dropout_p < 1))
    refuse<InvalidArgument>(function, "dropout_p", "is " + number_string(options.dropout_p),
                            "a probability of at least 0 and below 1");
  problem.dropout = Dropout::of(options.dropout_p, options.seed);
  problem.deterministic = options.deterministic;
  problem.alibi = t.alibi_slopes.given();
  problem.sinks = t.sinks.given();
  return problem;
}

Problem check_backward(const char* function, const BackwardTensors& t, const Options& options) {
  const Problem problem = check_forward(function, t.forward, options);
  const ForwardTensors& f = t.forward;
  check_out(function, "out", f.out, f);
  check_lse(function, "lse", f.lse, f.q);
  check_out(function, "dout", t.dout, f);
  if (t.dlse.given()) check_lse(function, "dlse", t.dlse, f.q);

  const auto check_gradient = [&](const char* name, const char* sizes, const TensorView& gradient,
                                  const TensorView& of) {
    if (!gradient.given()) return;  // not wanted
    const auto [a, b, c, d] = of.shape;
    Operand{function, name, sizes, gradient}.has_shape({a, b, c, d}).is_matrix_like(f.q);
  };
  check_gradient("dq", kSizesQ, t.dq, f.q);
  check_gradient("dk", kSizesK, t.dk, f.k);
  check_gradient("dv", kSizesV, t.dv, f.v);
  if (t.dsinks.given()) {
    if (!problem.sinks) refuse<InvalidArgument>(function, "dsinks", "is given", "none where there are no sinks");
    check_per_head(function, "dsinks", t.dsinks, f.q);
  }
  return problem;
}

}  // namespace flashtile
