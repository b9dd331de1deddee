#include "flashtile/merge.h"

#include "cpu.h"
#include "flashtile/math/merged_row.h"
#include "pack.h"
#include "parallel.h"

namespace flashtile::cpu {
namespace {

constexpr int kRows = 16;  // of an item, of all heads

template <class T>
void merge_rows(const MergeCall& call, int threads) {
  const TensorView &total = call.total.out, &part = call.part.out;
  const RowStates totals = RowStates::of(call.total.state), parts = RowStates::of(call.part.state);
  const float unit_log2 = call.unit * kLog2e;
  const int rows = static_cast<int>(total.shape[1]), heads = static_cast<int>(total.shape[2]);
  const auto width = static_cast<int>(total.shape[3]);
  const auto at = [](const TensorView& x, int batch, int row, int head) {
    return batch * x.strides[0] + row * x.strides[1] + head * x.strides[2];
  };
  const auto merge_row = [&](int batch, int row, int head) {
    float* const to = static_cast<float*>(total.data) + at(total, batch, row, head);
    const T* const from = static_cast<const T*>(part.data) + at(part, batch, row, head);
    const std::int64_t place = totals.at(batch, head, row);
    const FinishedRow known = call.first ? FinishedRow{} : totals.load(place);
    const MergedRow merged = MergedRow::of(known, parts.load(parts.at(batch, head, row)), unit_log2);
    for (int i = 0; i < width; ++i) to[i] = merged.out(to[i], widen(from[i]));
    totals.store(place, merged.row);
  };
  const int blocks = (rows + kRows - 1) / kRows;
  parallel_for(threads, total.shape[0] * blocks, [&](int, std::int64_t item) {
    const int batch = static_cast<int>(item / blocks), first = static_cast<int>(item % blocks) * kRows;
    for (int row = first; row < first + kRows && row < rows; ++row)
      for (int head = 0; head < heads; ++head) merge_row(batch, row, head);
  });
}

}  // namespace

void merge(const MergeCall& call, int threads) {
  switch (call.part.out.dtype) {
    case DType::kFloat16: return merge_rows<Half>(call, threads);
    case DType::kBFloat16: return merge_rows<BFloat16>(call, threads);
    default: return merge_rows<float>(call, threads);
  }
}

}  // namespace flashtile::cpu
