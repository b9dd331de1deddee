// This file answers whether a call is legal. It holds every rule of the contract about arguments, except those of
// caches, which are in check_kvcache.cpp, and those of options, which are in options.cpp. A call that keeps them all
// pays only for comparisons of integers: messages are built when one is broken.
#include "flashtile/flashtile.h"
#include "operand.h"
#include "options.h"
#include "overlap.h"

namespace flashtile {
namespace {

constexpr Names kDenseNames{"(B, S_q, H_q, D)",   "(B, S_k, H_k, D)", "(B, S_k, H_k, D_v)",
                            "(B, S_q, H_q, D_v)", "(B, H_q, S_q)",    "(2, B, H_q, S_q)"};
constexpr Names kRaggedNames{"(T_q, H_q, D)",   "(T_k, H_k, D)", "(T_k, H_k, D_v)",
                             "(T_q, H_q, D_v)", "(H_q, T_q)",    "(2, H_q, T_q)"};

void refuse_if_given(const char* function, const char* name, const TensorView& table) {
  if (table.given()) refuse<InvalidArgument>(function, name, "is given", "none without cu_seqlens_q and cu_seqlens_k");
}

void check_sequences(const char* function, const ForwardTensors& t, const Problem& p) {
  check_tables({function, "cu_seqlens_q", "(B + 1)", t.cu_seqlens_q}, {function, "seqused_q", "(B)", t.seqused_q},
               "T_q", p.seqlen_q, p.batch, p.device);
  check_tables({function, "cu_seqlens_k", "(B + 1)", t.cu_seqlens_k}, {function, "seqused_k", "(B)", t.seqused_k},
               "T_k", p.seqlen_k, p.batch, p.device);
}

/// Returns the name of an argument that only e4m3 numbers have, or null if none is given.
const char* given_of_fp8(const ForwardTensors& t, const Options& options) {
  if (t.q_descale.given()) return "q_descale";
  if (t.k_descale.given()) return "k_descale";
  if (t.v_descale.given()) return "v_descale";
  return options.out_dtype != DType::kOther ? "out_dtype" : nullptr;
}

/// Checks the dtypes of q and out; those of k and v are q's.
void check_dtypes(const Operand& q, const ForwardTensors& t, const Options& options, Problem& p) {
  p.dtype = p.out_dtype = q.view.dtype;
  p.fp8 = p.dtype == DType::kE4M3 || options.fp8;
  if (options.fp8) q.has_dtype(DType::kFloat32);
  if (p.dtype != DType::kE4M3) {
    if (const char* const given = given_of_fp8(t, options))
      q.has_dtype(DType::kE4M3, (", as " + std::string(given) + " is given").c_str());
    return check_floating(q);
  }
  p.out_dtype = options.out_dtype == DType::kOther ? DType::kBFloat16 : options.out_dtype;
  const bool may_be_wide = q.view.device.type == DeviceType::kCpu;
  if (p.out_dtype != DType::kBFloat16 && p.out_dtype != DType::kFloat16 &&
      !(may_be_wide && p.out_dtype == DType::kFloat32))
    refuse<InvalidType>(q.function, "out_dtype", std::string("is ") + name_of(p.out_dtype),
                        may_be_wide ? "bfloat16, float16 or float32" : "bfloat16 or float16");
}

void check_descale(const char* function, const char* name, const TensorView& descale, Size rows, int heads,
                   const Problem& p) {
  if (!descale.given()) return;
  const Operand operand{function, name, "", descale};
  operand.has_dtype(DType::kFloat32).is_on(p.device);
  const Size blocks[] = {(rows + 127) / 128, (rows + 63) / 64};
  const auto& shape = descale.shape;
  const auto is_one_of = [](Size size, Size a, Size b) { return size == a || size == b; };
  const bool fits =
      (descale.rank == 2 || (descale.rank == 3 && !p.ragged && is_one_of(shape[2], blocks[0], blocks[1]))) &&
      shape[0] == p.batch && is_one_of(shape[1], heads, p.heads_k);
  if (fits) return;
  const auto either = [](Size a, Size b) { return std::to_string(a) + (a == b ? "" : " or " + std::to_string(b)); };
  const std::string in_blocks =
      p.ragged ? "" : " or (B, H, " + either(blocks[0], blocks[1]) + "), for blocks of 64 or 128 rows";
  operand.refuse_shape("(B, H)" + in_blocks + ", where B is " + std::to_string(p.batch) + " and H " +
                       either(heads, p.heads_k));
}

void check_descales(const char* function, const ForwardTensors& t, const Problem& p) {
  check_descale(function, "q_descale", t.q_descale, p.seqlen_q, p.heads_q, p);
  check_descale(function, "k_descale", t.k_descale, p.seqlen_k, p.heads_k, p);
  check_descale(function, "v_descale", t.v_descale, p.seqlen_k, p.heads_k, p);
}

}  // namespace

const Names& names_of(const Problem& p) {
  return p.ragged ? kRaggedNames : kDenseNames;
}

const Operand& has_rows(const Operand& operand, const Problem& p, Size rows, Size heads, Size width) {
  return p.ragged ? operand.has_shape({rows, heads, width}) : operand.has_shape({p.batch, rows, heads, width});
}

void check_floating(const Operand& q) {
  if (q.view.dtype == DType::kInt32 || q.view.dtype == DType::kOther || is_fp8(q.view.dtype))
    q.refuse<InvalidType>(std::string("has dtype ") + name_of(q.view.dtype), "float32, float16 or bfloat16");
}

bool has_whole_rows(const TensorView& t) {
  return t.device.type != DeviceType::kCuda || t.shape[t.rank - 1] * bytes_of(t.dtype) % kAlignment == 0;
}

void check_whole_rows(const Operand& operand) {
  const TensorView& t = operand.view;
  if (has_whole_rows(t)) return;
  operand.refuse<Unsupported>("has head dimension " + std::to_string(t.shape[t.rank - 1]),
                              "a multiple of 16 of " + std::string(name_of(t.dtype)) + " on CUDA");
}

void check_head_dim(const Operand& operand, const char* size_name) {
  const Size d = operand.view.shape[operand.view.rank - 1];
  if (d % kHeadDimStep != 0 || d < kHeadDimStep || d > kHeadDimLimit)
    operand.refuse_shape(std::string(size_name) + " to be a multiple of " + std::to_string(kHeadDimStep) + " from " +
                         std::to_string(kHeadDimStep) + " to " + std::to_string(kHeadDimLimit));
}

void check_sizes(const Operand& operand) {
  for (int i = 0; i < operand.view.rank - 1; ++i)
    if (operand.view.shape[i] >= kSizeLimit)
      operand.refuse_shape(std::string("sizes ") + operand.sizes + " below 2^30");
}

void check_heads(const Operand& q, const Operand& k, Size heads_q, Size heads_k) {
  if (heads_k < 1) k.refuse_shape("at least one head");
  if (heads_q % heads_k != 0)
    q.refuse("has H_q = " + std::to_string(heads_q) + " heads",
             "a multiple of H_k = " + std::to_string(heads_k) + " of " + k.name);
}

const int* check_table(const Operand& operand, Size count, Device device) {
  operand.has_shape({count}).has_dtype(DType::kInt32).is_on(device).is_contiguous();
  return static_cast<const int*>(operand.view.data);
}

void check_tables(const Operand& begins_operand, const Operand& used_operand, const char* rows_name, int rows,
                  int batch, Device device) {
  const int* const begins = check_table(begins_operand, Size{batch} + 1, device);
  const int* const used = used_operand.view.given() ? check_table(used_operand, batch, device) : nullptr;
  if (device.type != DeviceType::kCpu) return;  // the host cannot see these values: kernels stay in bounds
  if (begins[0] != 0) begins_operand.refuse(at_index(begins[0], 0), "0");
  for (int b = 0; b < batch; ++b) {
    const int first = begins[b], end = begins[b + 1];
    if (end < first)
      begins_operand.refuse(at_index(end, b + 1), "at least " + std::to_string(first) + ", the one before");
    if (end > rows) begins_operand.refuse(at_index(end, b + 1), "at most " + std::to_string(rows) + " = " + rows_name);
    if (used != nullptr && (used[b] < 0 || used[b] > end - first))
      used_operand.refuse(at_index(used[b], b), "from 0 to the sequence's length " + std::to_string(end - first));
  }
}

Size batch_of(const Operand& begins) {
  begins.has_rank(1);
  const Size count = begins.view.shape[0];
  if (count < 1 || count > kSizeLimit) begins.refuse_shape("from 1 to 2^30 numbers = (B + 1)");
  return count - 1;
}

void check_alibi_slopes(const char* function, const TensorView& slopes, const Problem& p) {
  const Operand operand{function, "alibi_slopes", slopes.rank == 2 ? "(B, H_q)" : "(H_q)", slopes};
  slopes.rank == 2 ? operand.has_shape({p.batch, p.heads_q}) : operand.has_shape({p.heads_q});
  operand.has_dtype(DType::kFloat32).is_on(p.device).has_contiguous_last_dimension<Unreadable>();
}

void check_mask(const char* function, const TensorView& mask, Problem& p) {
  const Operand operand{function, "mask",
                        p.ragged ? "(1, 1 or H_k or H_q, T_k, 4)" : "(1 or B, 1 or H_k or H_q, S_k, 4)", mask};
  check_columns(operand, !p.ragged, p.seqlen_k, p);
}

/// The values are those of HiddenRows. Kernels take each range at its word, so that no value is wrong, and read nothing
/// by it.
void check_columns(const Operand& operand, bool may_have_entries, Size columns, Problem& p) {
  operand.has_rank(4);
  const TensorView& mask = operand.view;
  const Size entries = mask.shape[0], heads = mask.shape[1];
  const bool shared = entries == 1, of_entries = may_have_entries && entries == p.batch;
  if (!shared && !of_entries)
    operand.refuse_shape(std::string("1") + (may_have_entries ? " or B = " + std::to_string(p.batch) : "") +
                         " entries in " + operand.sizes);
  if (heads < 1 || (heads != 1 && heads != p.heads_k && heads != p.heads_q))
    operand.refuse_shape("1, H_k = " + std::to_string(p.heads_k) + " or H_q = " + std::to_string(p.heads_q) +
                         " heads in " + operand.sizes);
  if (mask.shape[2] != columns || mask.shape[3] != 4)
    operand.refuse_shape("(..., " + std::to_string(columns) + ", 4) = " + operand.sizes);
  operand.has_dtype(DType::kInt32).is_on(p.device);
  // A column's four numbers are read at once.
  const auto has_stride = [&](int i, Size stride) { return mask.shape[i] < 2 || mask.strides[i] == stride; };
  const bool whole = has_stride(3, 1) && has_stride(2, 4) && (mask.shape[1] < 2 || mask.strides[1] % 4 == 0) &&
                     (mask.shape[0] < 2 || mask.strides[0] % 4 == 0);
  if (!whole && !mask.empty())
    operand.refuse<Unreadable>("has strides " + shape_string(mask.strides.data(), mask.rank),
                               "(multiples of 4, multiples of 4, 4, 1)");
  if (reinterpret_cast<std::uintptr_t>(mask.data) % kAlignment != 0 && !mask.empty())
    operand.refuse<Unreadable>("is at an address that is not a multiple of 16 bytes", "one that is");
  p.masks_of_entry = static_cast<int>(heads);
  p.masked_entries = static_cast<int>(entries);
}

void check_per_head(const char* function, const char* name, const TensorView& values, const Problem& p) {
  Operand{function, name, "(H_q)", values}
      .has_shape({p.heads_q})
      .has_dtype(DType::kFloat32)
      .is_on(p.device)
      .has_contiguous_last_dimension<Unreadable>();
}

void check_lse(const char* function, const char* name, const TensorView& lse, const Problem& p) {
  const Operand operand{function, name, names_of(p).lse, lse};
  p.ragged ? operand.has_shape({p.heads_q, p.seqlen_q}) : operand.has_shape({p.batch, p.heads_q, p.seqlen_q});
  operand.has_dtype(DType::kFloat32).is_on(p.device).is_contiguous();
}

void check_max_logits(const char* function, const TensorView& max_logits, const Problem& p) {
  Operand{function, "max_logits", "(B, H_q)", max_logits}
      .has_shape({p.batch, p.heads_q})
      .has_dtype(DType::kFloat32)
      .is_on(p.device)
      .is_contiguous();
}

void check_state(const char* function, const TensorView& state, const Problem& p) {
  const Operand operand{function, "state", names_of(p).state, state};
  p.ragged ? operand.has_shape({2, p.heads_q, p.seqlen_q}) : operand.has_shape({2, p.batch, p.heads_q, p.seqlen_q});
  operand.has_dtype(DType::kFloat32).is_on(p.device).is_contiguous();
}

void check_out(const char* function, const char* name, const TensorView& out, const TensorView& q, const Problem& p) {
  const Operand operand{function, name, names_of(p).out, out};
  has_rows(operand, p, p.seqlen_q, p.heads_q, p.head_dim_v);
  p.fp8 ? operand.has_dtype(p.out_dtype).lies_like(q) : operand.is_matrix_like(q);
}

void check_place(const Operand& out, std::initializer_list<Operand> read) {
  const TensorView& place = out.view;
  if (!place.given()) return;
  out.is_aligned<Unsupported>().is_writable("memory of its own for each row");
  for (const Operand& operand : read) {
    const bool shared = operand.view.dtype == place.dtype ? share_elements(operand.view, place)
                                                          : stretch_of(operand.view).meets(stretch_of(place));
    if (shared) out.refuse(std::string("shares memory with ") + operand.name, "memory of its own");
  }
}

void check_place(const char* function, const TensorView& out, const char* name, const TensorView& read) {
  check_place({function, "out", "", out}, {{function, name, "", read}});
}

Problem check_forward(const char* function, const ForwardTensors& t, const Options& options) {
  Problem problem;
  problem.ragged = t.cu_seqlens_q.given() || t.cu_seqlens_k.given();
  const Names& names = names_of(problem);
  const Operand q{function, "q", names.q, t.q};
  const Operand k{function, "k", names.k, t.k};
  const Operand v{function, "v", names.v, t.v};
  const int rows = problem.ragged ? 0 : 1;  // the dimension of rows, which heads and width follow
  q.has_rank(rows + 3);
  k.has_rank(rows + 3);
  v.has_rank(rows + 3);
  check_dtypes(q, t, options, problem);

  const Size seqlen_q = t.q.shape[rows], seqlen_k = t.k.shape[rows];
  const Size heads_q = t.q.shape[rows + 1], heads_k = t.k.shape[rows + 1];
  const Size head_dim = t.q.shape[rows + 2], head_dim_v = t.v.shape[rows + 2];
  check_sizes(q);
  problem.batch =
      static_cast<int>(problem.ragged ? batch_of({function, "cu_seqlens_q", "(B + 1)", t.cu_seqlens_q}) : t.q.shape[0]);
  has_rows(k, problem, seqlen_k, heads_k, head_dim);
  has_rows(v, problem, seqlen_k, heads_k, head_dim_v);
  check_sizes(k);
  check_heads(q, k, heads_q, heads_k);
  check_head_dim(q, "D");
  check_head_dim(v, "D_v");
  for (const Operand& operand : {q, k, v}) {
    if (!is_fp8(t.q.dtype)) {
      operand.is_matrix_like(t.q);
      continue;
    }
    operand.has_dtype(t.q.dtype, ", as q").is_on(t.q.device).has_contiguous_last_dimension<Unreadable>();
    if (has_whole_rows(operand.view)) operand.is_aligned();
  }
  problem.seqlen_q = static_cast<int>(seqlen_q);
  problem.seqlen_k = static_cast<int>(seqlen_k);
  problem.heads_q = static_cast<int>(heads_q);
  problem.heads_k = static_cast<int>(heads_k);
  problem.head_dim = static_cast<int>(head_dim);
  problem.head_dim_v = static_cast<int>(head_dim_v);
  problem.device = t.q.device;
  if (problem.ragged) {
    check_sequences(function, t, problem);
  } else {
    refuse_if_given(function, "seqused_q", t.seqused_q);
    refuse_if_given(function, "seqused_k", t.seqused_k);
  }
  if (t.alibi_slopes.given()) check_alibi_slopes(function, t.alibi_slopes, problem);
  if (t.sinks.given()) check_per_head(function, "sinks", t.sinks, problem);
  if (t.mask.given()) check_mask(function, t.mask, problem);
  check_descales(function, t, problem);
  if (t.out.given()) check_out(function, "out", t.out, t.q, problem);
  if (t.lse.given()) check_lse(function, "lse", t.lse, problem);
  if (t.state.given()) check_state(function, t.state, problem);
  if (t.max_logits.given()) check_max_logits(function, t.max_logits, problem);
  check_options(function, options, problem);
  problem.alibi = t.alibi_slopes.given();
  problem.sinks = t.sinks.given();
  problem.max_logits = t.max_logits.given();
  check_whole_rows(q);  // last, as such a call is computed in another way if it is legal
  check_whole_rows(v);
  return problem;
}

Problem check_backward(const char* function, const BackwardTensors& t, const Options& options) {
  const Problem problem = check_forward(function, t.forward, options);
  if (problem.fp8)
    refuse<Unsupported>(function, "q", std::string("has dtype ") + name_of(problem.dtype), "one of 16 bits or float32");
  const ForwardTensors& f = t.forward;
  const Names& names = names_of(problem);
  check_out(function, "out", f.out, f.q, problem);
  if (!f.state.given()) check_lse(function, "lse", f.lse, problem);
  check_out(function, "dout", t.dout, f.q, problem);
  if (t.dlse.given()) check_lse(function, "dlse", t.dlse, problem);

  const auto check_gradient = [&](const char* name, const char* sizes, const TensorView& gradient,
                                  const TensorView& of) {
    if (!gradient.given()) return;  // the gradient is not wanted
    const int last = of.rank - 1;
    has_rows({function, name, sizes, gradient}, problem, of.shape[last - 2], of.shape[last - 1], of.shape[last])
        .is_matrix_like(f.q);
  };
  check_gradient("dq", names.q, t.dq, f.q);
  check_gradient("dk", names.k, t.dk, f.k);
  check_gradient("dv", names.v, t.dv, f.v);
  if (t.dsinks.given()) {
    if (!problem.sinks) refuse<InvalidArgument>(function, "dsinks", "is given", "none where there are no sinks");
    check_per_head(function, "dsinks", t.dsinks, problem);
  }
  return problem;
}

}  // namespace flashtile
