#include "flashtile/merge.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "flashtile/cuda/divisor.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/math/merged_row.h"
#include "flashtile/params.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256;
// A thread has this many neighbouring elements of either half of a row. So a warp accesses whole sectors of 32 bytes,
// at 16 bytes a thread: with eight neighbours, each of two stores would fill the halves of sectors.
constexpr int kRun = 4;

struct MergeParams {
  float* total;
  const void* part;
  Strides total_strides, part_strides;
  RowStates totals, parts;
  float unit_log2;
  bool first;
  int rows;           // S
  int half;           // of a row's elements
  int rows_of_block;  // one head's, as threads of a row share a thread block
  Divisor sharers;    // threads of a row
  Divisor heads;
  Divisor blocks;  // of a head
};

template <class Element>
__device__ float4 load_run(const Element* from) {
  if constexpr (std::is_same_v<Element, float>) {
    return *reinterpret_cast<const float4*>(from);
  } else {
    const uint2 read = *reinterpret_cast<const uint2*>(from);
    const auto* const elements = reinterpret_cast<const Element*>(&read);
    return {float(elements[0]), float(elements[1]), float(elements[2]), float(elements[3])};
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) merge_rows(const __grid_constant__ MergeParams params) {
  // Heads come first: neighbouring thread blocks access neighbouring memory.
  const int of_batch = params.heads.quotient(int(blockIdx.x)), head = int(blockIdx.x) - of_batch * params.heads.value;
  const int batch = params.blocks.quotient(of_batch), block = of_batch - batch * params.blocks.value;
  const int of_block = params.sharers.quotient(int(threadIdx.x));
  const int sharer = int(threadIdx.x) - of_block * params.sharers.value;
  const int row = block * params.rows_of_block + of_block;
  const bool there = of_block < params.rows_of_block && row < params.rows;

  const std::int64_t place = params.totals.at(batch, head, row);
  FinishedRow after;
  if (there) {
    float* const to = params.total + params.total_strides.at(batch, row) + head * params.total_strides.head;
    const Element* const from =
        static_cast<const Element*>(params.part) + params.part_strides.at(batch, row) + head * params.part_strides.head;
    const int runs[] = {kRun * sharer, params.half + kRun * sharer};
    float4 a[2] = {}, b[2];
    FinishedRow known;
    if (!params.first) {
      known = params.totals.load(place);
      for (int i = 0; i < 2; ++i) a[i] = load_run(to + runs[i]);
    }
    const FinishedRow added = params.parts.load(params.parts.at(batch, head, row));
    for (int i = 0; i < 2; ++i) b[i] = load_run(from + runs[i]);
    const MergedRow merged = MergedRow::of(known, added, params.unit_log2);
    after = merged.row;
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float4*>(to + runs[i]) = {merged.out(a[i].x, b[i].x), merged.out(a[i].y, b[i].y),
                                                  merged.out(a[i].z, b[i].z), merged.out(a[i].w, b[i].w)};
  }
  __syncthreads();  // whoever stores a row's state waits for the threads that load what it was
  if (there && sharer == 0) params.totals.store(place, after);
}

template <class Element>
void launch_elements(const MergeParams& params, int batch, Device device, Stream stream) {
  static KernelHandles handles;
  const int grid = batch * params.blocks.value * params.heads.value;
  launch(merge_rows<Element>, handles, device, {grid, kThreads, 0}, params, stream);
}

}  // namespace

void launch_merge(const MergeCall& call, Stream stream) {
  const TensorView &total = call.total.out, &part = call.part.out;
  const auto size = [&](int i) { return static_cast<int>(total.shape[i]); };
  const int half = size(3) / 2, sharers = half / kRun, rows_of_block = kThreads / sharers;
  const MergeParams params{.total = static_cast<float*>(total.data),
                           .part = part.data,
                           .total_strides = Strides::of(total),
                           .part_strides = Strides::of(part),
                           .totals = RowStates::of(call.total.state),
                           .parts = RowStates::of(call.part.state),
                           .unit_log2 = call.unit * kLog2e,
                           .first = call.first,
                           .rows = size(1),
                           .half = half,
                           .rows_of_block = rows_of_block,
                           .sharers = Divisor(sharers),
                           .heads = Divisor(size(2)),
                           .blocks = Divisor((size(1) + rows_of_block - 1) / rows_of_block)};
  switch (part.dtype) {
    case DType::kFloat16: return launch_elements<__half>(params, size(0), total.device, stream);
    case DType::kBFloat16: return launch_elements<__nv_bfloat16>(params, size(0), total.device, stream);
    default: return launch_elements<float>(params, size(0), total.device, stream);
  }
}

}  // namespace flashtile
