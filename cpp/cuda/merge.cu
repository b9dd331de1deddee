#include "flashtile/merge.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "flashtile/cuda/divisor.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/math/merged_row.h"
#include "flashtile/params.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 16;  // of a row, that a thread has

struct MergePart {
  const void* out;
  Strides strides;
  RowStates states;
  int begin, end;
};

struct MergeParams {
  void* out;
  Strides strides;
  RowStates states;
  MergePart parts[kMostParts];
  int count;
  float unit_log2;
  bool adds;
  int rows;           // S
  int width;          // D_v
  int rows_of_block;  // one head's, as threads of a row share a thread block
  Divisor sharers;    // threads of a row
  Divisor heads;
  Divisor blocks;  // of a head
};

/// Columns are where a thread's runs of kRun neighbouring elements lie in a row. Threads of a row have neighbouring
/// runs, so that a warp accesses whole sectors of 32 bytes. Runs behind the row's end are not stored, and read as the
/// first.
template <int kRun>
struct Columns {
  static constexpr int kRuns = kElements / kRun;
  int begin[kRuns];
  bool there[kRuns];

  __device__ Columns(int sharer, int sharers, int width) {
    for (int i = 0; i < kRuns; ++i) {
      const int column = kRun * (sharer + i * sharers);
      there[i] = column < width;
      begin[i] = there[i] ? column : 0;
    }
  }
};

/// Elements are those of a thread, as they lie in memory.
template <class Element, int kRun>
struct Elements {
  using Words = std::conditional_t<kRun * sizeof(Element) == 16, uint4, uint2>;
  Words runs[kElements / kRun];

  __device__ void load(const Element* row, Columns<kRun> const& columns) {
    for (int i = 0; i < kElements / kRun; ++i) runs[i] = *reinterpret_cast<const Words*>(row + columns.begin[i]);
  }
  __device__ void store(Element* row, Columns<kRun> const& columns) const {
    for (int i = 0; i < kElements / kRun; ++i)
      if (columns.there[i]) *reinterpret_cast<Words*>(row + columns.begin[i]) = runs[i];
  }
  __device__ float at(int i) const { return static_cast<float>(reinterpret_cast<const Element*>(runs)[i]); }
  __device__ void set(int i, float x) { reinterpret_cast<Element*>(runs)[i] = static_cast<Element>(x); }
};

/// States of rows are not read where the parts are summed: any that has seen something stands for them.
template <class Part, class Out, bool kSums>
__global__ void __launch_bounds__(kThreads) merge_rows(const __grid_constant__ MergeParams params) {
  constexpr int kRun = 16 / std::max(sizeof(Part), sizeof(Out));  // of no more than 16 bytes
  constexpr int kInFlight = 8 / sizeof(Part);  // parts that a thread reads before it uses the first: 128 bytes
  constexpr FinishedRow kSeen{0, 0};
  // Heads come first: neighbouring thread blocks access neighbouring memory.
  const int of_batch = params.heads.quotient(int(blockIdx.x)), head = int(blockIdx.x) - of_batch * params.heads.value;
  const int batch = params.blocks.quotient(of_batch), block = of_batch - batch * params.blocks.value;
  const int of_block = params.sharers.quotient(int(threadIdx.x));
  const int sharer = int(threadIdx.x) - of_block * params.sharers.value;
  const int row = block * params.rows_of_block + of_block;
  const bool there = of_block < params.rows_of_block && row < params.rows;

  MergedRow merged;
  if (there) {
    Out* const to = static_cast<Out*>(params.out) + params.strides.at(batch, row) + head * params.strides.head;
    const Columns<kRun> columns(sharer, params.sharers.value, params.width);
    float sums[kElements] = {};
    const auto add = [&](FinishedRow const& state, const auto& elements) {
      if (state.saw_nothing()) return;  // so whatever the elements are does not count
      if constexpr (kSums) {
        for (int i = 0; i < kElements; ++i) sums[i] += elements.at(i);
      } else {
        const MergedRow::Step step = merged.add(state, params.unit_log2);
        for (int i = 0; i < kElements; ++i) sums[i] = step.sum(sums[i], elements.at(i));
      }
    };
    if (params.adds) {
      Elements<Out, kRun> known;
      known.load(to, columns);
      add(kSums ? kSeen : params.states.load(params.states.at(batch, head, row)), known);
    }
    for (int next = 0; next < params.count; next += kInFlight) {
      FinishedRow states[kInFlight];
      Elements<Part, kRun> read[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (next + i >= params.count) continue;
        const MergePart& part = params.parts[next + i];
        if (row < part.begin || row >= part.end) continue;
        const int at = row - part.begin;
        read[i].load(static_cast<const Part*>(part.out) + part.strides.at(batch, at) + head * part.strides.head,
                     columns);
        states[i] = kSums ? kSeen : part.states.load(part.states.at(batch, head, at));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) add(states[i], read[i]);
    }
    const float normaliser = kSums ? 1.0f : merged.normaliser();
    Elements<Out, kRun> out;
    for (int i = 0; i < kElements; ++i) out.set(i, normaliser * sums[i]);
    out.store(to, columns);
  }
  if constexpr (!kSums) {
    __syncthreads();  // whoever stores a row's state waits for the threads that load what it was
    if (there && sharer == 0) params.states.store(params.states.at(batch, head, row), merged.row());
  }
}

template <class Part, class Out>
void launch_dtypes(const MergeParams& params, int batch, Device device, Stream stream) {
  const LaunchShape shape{batch * params.blocks.value * params.heads.value, kThreads, 0};
  if (params.states.data) {
    static KernelHandles handles;
    launch(merge_rows<Part, Out, false>, handles, device, shape, params, stream);
  } else {
    static KernelHandles handles;
    launch(merge_rows<Part, Out, true>, handles, device, shape, params, stream);
  }
}

}  // namespace

void launch_merge(const MergeCall& call, Stream stream) {
  const TensorView& out = call.out;
  const auto size = [&](int i) { return static_cast<int>(out.shape[i]); };
  const int sharers = (size(3) + kElements - 1) / kElements, rows_of_block = kThreads / sharers;
  MergeParams params{.out = out.data,
                     .strides = Strides::of(out),
                     .states = RowStates::of(call.state),
                     .parts = {},
                     .count = static_cast<int>(call.parts.size()),
                     .unit_log2 = call.unit * kLog2e,
                     .adds = call.adds,
                     .rows = size(1),
                     .width = size(3),
                     .rows_of_block = rows_of_block,
                     .sharers = Divisor(sharers),
                     .heads = Divisor(size(2)),
                     .blocks = Divisor((size(1) + rows_of_block - 1) / rows_of_block)};
  for (int i = 0; i < params.count; ++i) {
    const PartialResult& part = call.parts[i];
    params.parts[i] = {part.out.data, Strides::of(part.out), RowStates::of(part.state), static_cast<int>(part.begin),
                       static_cast<int>(part.end)};
  }
  const auto launch_from = [&]<class Part>(Part) {
    const auto launch_to = [&]<class Out>(Out) { launch_dtypes<Part, Out>(params, size(0), out.device, stream); };
    if (out.dtype == DType::kFloat32) return launch_to(float());
    if constexpr (std::is_same_v<Part, float>)
      return out.dtype == DType::kFloat16 ? launch_to(__half()) : launch_to(__nv_bfloat16());
    else
      return launch_to(Part());
  };
  switch (call.parts[0].out.dtype) {
    case DType::kFloat16: return launch_from(__half());
    case DType::kBFloat16: return launch_from(__nv_bfloat16());
    default: return launch_from(float());
  }
}

}  // namespace flashtile
