#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "flashtile/append.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/params.h"
#include "flashtile/prefill.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256, kRows = 16;  // of a thread block
constexpr int kChunk = 16;                 // numbers that a thread reads at once

/// This widens the rows of one cache into one of (B, rows of a sequence, H_k, width), contiguous.
struct Widening {
  const void* from = nullptr;
  void* to = nullptr;
  Strides strides;
  CacheDescales descales;
  int chunks = 0;  // of a row of a head
};

struct WidenParams {
  Widening k, v;
  CachedRows rows;
  Pages pages;
  int heads = 0;
  int blocks = 0;       // of kRows rows, of a sequence
  int* held = nullptr;  // (B): rows that each sequence holds, with those that were added
};

/// Writes 16 numbers times their descale, each rounded once.
template <class Element, __nv_fp8_interpretation_t kKind>
__device__ void widen_chunk(const void* from, Element* to, float descale) {
  const uint4 numbers = __ldcs(static_cast<const uint4*>(from));
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
  Pair wide[kChunk / 2];
  const std::uint32_t words[] = {numbers.x, numbers.y, numbers.z, numbers.w};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> i % 2 * 16);
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(two, kKind);
    const float2 pair = __half22float2(halves);
    if constexpr (std::is_same_v<Element, __half>)
      wide[i] = __floats2half2_rn(pair.x * descale, pair.y * descale);
    else
      wide[i] = __floats2bfloat162_rn(pair.x * descale, pair.y * descale);
  }
  const auto* const read = reinterpret_cast<const uint4*>(wide);
  reinterpret_cast<uint4*>(to)[0] = read[0];
  reinterpret_cast<uint4*>(to)[1] = read[1];
}

/// Runs a thread block for every kRows rows that a sequence has room for.
template <class Element, __nv_fp8_interpretation_t kKind>
__global__ void __launch_bounds__(kThreads) widen_rows(const __grid_constant__ WidenParams params) {
  const int b = int(blockIdx.x) / params.blocks, first = int(blockIdx.x) % params.blocks * kRows;
  const int end = params.rows.at(b).end;
  if (first == 0 && threadIdx.x == 0) params.held[b] = end;
  const int count = min(end - first, kRows);
  for (Widening const& one : {params.k, params.v}) {
    const int of_row = params.heads * one.chunks;
    for (int i = threadIdx.x; i < count * of_row; i += kThreads) {
      const int row = first + i / of_row, head = i % of_row / one.chunks, chunk = i % one.chunks;
      const Pages::Place place = params.pages.at(b, row);
      const auto* const from = static_cast<const std::uint8_t*>(one.from) + one.strides.at(place.page, place.row) +
                               head * one.strides.head + chunk * kChunk;
      const std::int64_t at = (std::int64_t(b) * params.rows.capacity + row) * of_row + i % of_row;
      widen_chunk<Element, kKind>(from, static_cast<Element*>(one.to) + at * kChunk, one.descales.of(b, head, place));
    }
  }
}

template <class Element, __nv_fp8_interpretation_t kKind>
void launch_widen(const WidenParams& params, int batch, Device device, Stream stream) {
  static KernelHandles handles;
  launch(widen_rows<Element, kKind>, handles, device, {batch * params.blocks, kThreads, 0}, params, stream);
}

/// Returns a view of (B, rows of a sequence, H_k, width), contiguous.
TensorView wide_rows(void* data, const Problem& p, int width) {
  TensorView view{.data = data, .dtype = p.dtype, .device = p.device, .rank = 4};
  view.shape = {p.batch, p.seqlen_k, p.heads_k, width};
  view.strides = {std::int64_t{p.seqlen_k} * p.heads_k * width, std::int64_t{p.heads_k} * width, width, 1};
  return view;
}

void widen_and_attend(const KvcachePlan& plan, const KvcacheTensors& t, void* memory, Stream stream) {
  append(plan, t, memory, stream);

  const Problem& p = plan.problem;
  const WidenedRows places = WidenedRows::of(plan.widened_at, p);
  const auto at = [&](std::int64_t place) { return static_cast<char*>(memory) + place; };
  KvcacheTensors wide{.q = t.q,
                      .k_cache = wide_rows(at(places.k), p, p.head_dim),
                      .v_cache = wide_rows(at(places.v), p, p.head_dim_v),
                      .cache_seqlens = {.data = at(places.held), .dtype = DType::kInt32, .device = p.device, .rank = 1},
                      .out = t.out,
                      .lse = t.lse,
                      .cu_seqlens_q = t.cu_seqlens_q,
                      .alibi_slopes = t.alibi_slopes,
                      .sinks = t.sinks};
  if (plan.cache.rotary_dim > 0) {
    const std::int64_t row = std::int64_t{p.heads_q} * p.head_dim;
    wide.q.data = at(plan.rotated_at);
    wide.q.strides = {p.ragged ? 0 : p.seqlen_q * row, row, p.head_dim, 1};
  }
  const WidenParams params{.k = {t.k_cache.data, wide.k_cache.data, Strides::of(t.k_cache),
                                 CacheDescales::of(t.k_descale), p.head_dim / kChunk},
                           .v = {t.v_cache.data, wide.v_cache.data, Strides::of(t.v_cache),
                                 CacheDescales::of(t.v_descale), p.head_dim_v / kChunk},
                           .rows = plan.cache.rows(t),
                           .pages = plan.cache.layout(t),
                           .heads = p.heads_k,
                           .blocks = (p.seqlen_k + kRows - 1) / kRows,
                           .held = static_cast<int*>(wide.cache_seqlens.data)};
  const bool is_half = p.dtype == DType::kFloat16, is_e4m3 = plan.cache.stored() == DType::kE4M3;
  const auto launch = is_half
                          ? (is_e4m3 ? launch_widen<__half, __NV_E4M3> : launch_widen<__half, __NV_E5M2>)
                          : (is_e4m3 ? launch_widen<__nv_bfloat16, __NV_E4M3> : launch_widen<__nv_bfloat16, __NV_E5M2>);
  launch(params, p.batch, p.device, stream);
  plan.widened->run(*plan.widened, wide, at(places.rest), stream);
}

}  // namespace

KvcacheKernel widened_kernel() {
  return widen_and_attend;
}

}  // namespace flashtile
