#include "flashtile/kvcache.h"

#include "device.h"
#include "flashtile/error.h"
#include "max_logits.h"
#include "operand.h"

namespace flashtile {
namespace {

const int* data_of(const TensorView& table) {
  return static_cast<const int*>(table.data);
}

}  // namespace

KvcacheTensors KvcacheTensors::with_batch() const {
  KvcacheTensors t = *this;
  for (TensorView* view : {&t.q, &t.out, &t.k_new, &t.v_new}) *view = view->with_batch();
  return t;
}

int rows_to_next(const TensorView& t) {
  if (t.shape[0] <= 1 || t.shape[1] <= 1) return static_cast<int>(t.shape[1]);
  const std::int64_t apart = t.strides[0], of_row = t.strides[1];
  if (of_row <= 0 || apart % of_row != 0) return 0;
  const std::int64_t rows = apart / of_row;
  const bool fits = rows == t.shape[1] || (rows > 0 && rows < Band::kUnbounded / t.shape[0]);
  return fits ? static_cast<int>(rows) : 0;
}

Spans KvcacheProblem::queries(const KvcacheTensors& t) const {
  return {problem.batch, problem.seqlen_q, data_of(t.cu_seqlens_q), nullptr};
}

CachedRows KvcacheProblem::rows(const KvcacheTensors& t) const {
  return {.batch = problem.batch,
          .capacity = problem.seqlen_k,
          .held = data_of(t.cache_seqlens),
          .skipped = data_of(t.leftpad),
          .added = seqlen_new,
          .added_begins = appends ? data_of(t.cu_seqlens_q) : nullptr};
}

Pages KvcacheProblem::layout(const KvcacheTensors& t) const {
  const bool paged = t.block_table.given();
  return {.table = data_of(paged ? t.block_table : t.cache_batch_idx),
          .table_stride = paged ? t.block_table.strides[0] : 1,
          .of_sequence = of_sequence,
          .pages = pages,
          .size = Divisor(page_size)};
}

LastColumns KvcacheProblem::masked(const KvcacheTensors& t) const {
  return {ColumnRanges::of(t.mask, problem.heads_q), masked_keys};
}

KvcachePlan plan_kvcache(const char* function, const KvcacheTensors& tensors, const KvcacheOptions& options,
                         const DeviceInfo& device) {
  const KvcacheTensors& t = tensors;
  check_place({function, "out", "", t.out}, {{function, "q", "", t.q},
                                             {function, "k_cache", "", t.k_cache},
                                             {function, "v_cache", "", t.v_cache},
                                             {function, "k_new", "", t.k_new},
                                             {function, "v_new", "", t.v_new}});
  const KvcacheProblem problem = check_kvcache(function, tensors, options);
  try {
    return select_kvcache(problem, device);
  } catch (const Unsupported& error) {
    throw Unsupported(std::string(function) + ": " + error.what());
  }
}

void run_kvcache(const KvcachePlan& plan, const KvcacheTensors& tensors, void* workspace, Stream stream) {
  const bool adds_rows = tensors.k_new.given() && !tensors.k_new.empty();
  clear_max_logits(plan.variant, tensors.out, tensors.max_logits, stream);
  if (tensors.out.empty() && !adds_rows) return;
  if (plan.run == nullptr) refuse_without_cuda(name_of(plan.variant) + " is not in this build");
  const DeviceGuard guard(plan.problem.device);
  if (plan.problem.ragged) return plan.run(plan, tensors.with_batch(), workspace, stream);
  plan.run(plan, tensors, workspace, stream);
}

}  // namespace flashtile
