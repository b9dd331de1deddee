#include "flashtile/merge.h"

#include <array>
#include <type_traits>

#include "cpu.h"
#include "flashtile/math/merged_row.h"
#include "pack.h"
#include "parallel.h"

namespace flashtile::cpu {
namespace {

constexpr int kRows = 16;     // of an item, of all heads
constexpr int kWidest = 256;  // D_v is at most this: kHeadDimLimit of operand.h

std::int64_t place(const TensorView& x, int batch, int row, int head) {
  return batch * x.strides[0] + row * x.strides[1] + head * x.strides[2];
}

template <class Part, class Out>
void merge_row(const MergeCall& call, int batch, int row, int head) {
  const bool sums = !call.state.given();
  const auto width = static_cast<int>(call.out.shape[3]);
  Out* const to = static_cast<Out*>(call.out.data) + place(call.out, batch, row, head);
  const auto state_of = [&](const TensorView& state, int at) {
    const RowStates states = RowStates::of(state);
    return sums ? FinishedRow{0, 0} : states.load(states.at(batch, head, at));  // in a sum, any that saw something
  };

  std::array<float, kWidest> total{};
  MergedRow merged;
  const auto add = [&](FinishedRow const& state, const auto* elements) {
    if (state.saw_nothing()) return;  // so whatever the elements are does not count
    const MergedRow::Step step = sums ? MergedRow::Step{1, 1} : merged.add(state, call.unit * kLog2e);
    for (int i = 0; i < width; ++i) total[i] = step.sum(total[i], widen(elements[i]));
  };
  if (call.adds) add(state_of(call.state, row), to);
  for (const PartialResult& part : call.parts) {
    if (row < part.begin || row >= part.end) continue;
    const int at = row - static_cast<int>(part.begin);
    add(state_of(part.state, at), static_cast<const Part*>(part.out.data) + place(part.out, batch, at, head));
  }
  const float normaliser = sums ? 1 : merged.normaliser();
  for (int i = 0; i < width; ++i) round_to(to[i], normaliser * total[i]);
  if (sums) return;
  const RowStates states = RowStates::of(call.state);
  states.store(states.at(batch, head, row), merged.row());
}

template <class Part, class Out>
void merge_rows(const MergeCall& call, int threads) {
  const int rows = static_cast<int>(call.out.shape[1]), heads = static_cast<int>(call.out.shape[2]);
  const int blocks = (rows + kRows - 1) / kRows;
  parallel_for(threads, call.out.shape[0] * blocks, [&](int, std::int64_t item) {
    const int batch = static_cast<int>(item / blocks), first = static_cast<int>(item % blocks) * kRows;
    for (int row = first; row < first + kRows && row < rows; ++row)
      for (int head = 0; head < heads; ++head) merge_row<Part, Out>(call, batch, row, head);
  });
}

template <class Part>
void merge_from(const MergeCall& call, int threads) {
  if (call.out.dtype == DType::kFloat32) return merge_rows<Part, float>(call, threads);
  if constexpr (std::is_same_v<Part, float>)
    return call.out.dtype == DType::kFloat16 ? merge_rows<Part, Half>(call, threads)
                                             : merge_rows<Part, BFloat16>(call, threads);
  else
    return merge_rows<Part, Part>(call, threads);
}

}  // namespace

void merge(const MergeCall& call, int threads) {
  switch (call.parts[0].out.dtype) {
    case DType::kFloat16: return merge_from<Half>(call, threads);
    case DType::kBFloat16: return merge_from<BFloat16>(call, threads);
    default: return merge_from<float>(call, threads);
  }
}

}  // namespace flashtile::cpu
