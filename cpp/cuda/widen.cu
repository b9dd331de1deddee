#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "flashtile/append.h"
#include "flashtile/cuda/divisor.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/params.h"
#include "flashtile/prefill.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256, kRows = 16;  // of a thread block

/// This copies the rows of one cache into one of (B, rows of a sequence, H_k, width), contiguous.
struct Copying {
  const void* from = nullptr;
  void* to = nullptr;
  Strides strides;
  CacheDescales descales;
  int width = 0;
  Divisor of_head, of_row;  // chunks, of which a thread reads one at once, of a head's row and of all heads'
};

struct CopyParams {
  Copying k, v;
  CachedRows rows;
  Pages pages;
  int heads = 0;
  int blocks = 0;       // of kRows rows, of a sequence
  int* held = nullptr;  // (B): rows that each sequence holds, with those that were added, and without its left padding
};

/// AsTheyAre copies numbers of 16 bits, as many as a thread reads at once.
struct AsTheyAre {
  static constexpr int kChunk = 8, kBytes = 2;

  __device__ static void copy(uint4 numbers, void* to, float) { *static_cast<uint4*>(to) = numbers; }
};

/// Widened ones of 8 bits are each multiplied with their descale and rounded once.
template <class Element, __nv_fp8_interpretation_t kKind>
struct Widened {
  static constexpr int kChunk = 16, kBytes = 1;

  __device__ static void copy(uint4 numbers, void* to, float descale) {
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
};

/// Runs a thread block for every kRows rows that a sequence has room for. A thread has several reads on their way.
template <class Numbers>
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ CopyParams params) {
  constexpr int kOfResult = 2;  // bytes
  constexpr int kReads = 4;
  const int b = int(blockIdx.x) / params.blocks, first = int(blockIdx.x) % params.blocks * kRows;
  const CachedRows::Rows rows = params.rows.at(b);
  if (first == 0 && threadIdx.x == 0) params.held[b] = rows.end - rows.begin;
  const int count = min(rows.end - rows.begin - first, kRows);
  const auto copy = [&](Copying const& one) {
    const int chunks = count * one.of_row.value;
    for (int from = threadIdx.x; from < chunks; from += kReads * kThreads) {
      uint4 numbers[kReads];
      float descales[kReads];
#pragma unroll
      for (int n = 0; n < kReads; ++n) {
        const int i = from + n * kThreads;
        if (i >= chunks) break;
        const int row = one.of_row.quotient(i), in_row = i - row * one.of_row.value;
        const int head = one.of_head.quotient(in_row), chunk = in_row - head * one.of_head.value;
        const Pages::Place place = params.pages.at(b, rows.begin + first + row);
        const std::int64_t number =
            one.strides.at(place.page, place.row) + head * one.strides.head + chunk * Numbers::kChunk;
        numbers[n] =
            __ldcs(reinterpret_cast<const uint4*>(static_cast<const char*>(one.from) + number * Numbers::kBytes));
        descales[n] = one.descales.of(b, head, place);
      }
#pragma unroll
      for (int n = 0; n < kReads; ++n) {
        const int i = from + n * kThreads;
        if (i >= chunks) break;
        const std::int64_t at = (std::int64_t(b) * params.rows.capacity + first) * one.of_row.value + i;
        Numbers::copy(numbers[n], static_cast<char*>(one.to) + at * Numbers::kChunk * kOfResult, descales[n]);
      }
    }
  };
  copy(params.k);
  copy(params.v);
}

template <class Numbers>
void launch_copy(CopyParams params, int batch, Device device, Stream stream) {
  static KernelHandles handles;
  for (Copying* one : {&params.k, &params.v}) {
    one->of_head = Divisor(one->width / Numbers::kChunk);
    one->of_row = Divisor(params.heads * one->of_head.value);
  }
  launch(copy_rows<Numbers>, handles, device, {batch * params.blocks, kThreads, 0}, params, stream);
}

/// Returns a view of (B, rows of a sequence, H_k, width), contiguous.
TensorView wide_rows(void* data, const Problem& p, int width) {
  TensorView view{.data = data, .dtype = p.dtype, .device = p.device, .rank = 4};
  view.shape = {p.batch, p.seqlen_k, p.heads_k, width};
  view.strides = {std::int64_t{p.seqlen_k} * p.heads_k * width, std::int64_t{p.heads_k} * width, width, 1};
  return view;
}

void copy_and_attend(const KvcachePlan& plan, const KvcacheTensors& t, void* memory, Stream stream) {
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
                      .max_logits = t.max_logits,
                      .cu_seqlens_q = t.cu_seqlens_q,
                      .alibi_slopes = t.alibi_slopes,
                      .sinks = t.sinks};
  if (plan.cache.rotary_dim > 0) {
    const std::int64_t row = std::int64_t{p.heads_q} * p.head_dim;
    wide.q.data = at(plan.rotated_at);
    wide.q.strides = {p.ragged ? 0 : p.seqlen_q * row, row, p.head_dim, 1};
  }
  const auto copying = [](const TensorView& from, const TensorView& descale, const TensorView& to) {
    return Copying{from.data, to.data, Strides::of(from), CacheDescales::of(descale), int(to.shape[3]), {}, {}};
  };
  const CopyParams params{.k = copying(t.k_cache, t.k_descale, wide.k_cache),
                          .v = copying(t.v_cache, t.v_descale, wide.v_cache),
                          .rows = plan.cache.rows(t),
                          .pages = plan.cache.layout(t),
                          .heads = p.heads_k,
                          .blocks = (p.seqlen_k + kRows - 1) / kRows,
                          .held = static_cast<int*>(wide.cache_seqlens.data)};
  const bool is_half = p.dtype == DType::kFloat16, is_e4m3 = plan.cache.stored() == DType::kE4M3;
  const auto launch =
      !is_fp8(plan.cache.stored()) ? launch_copy<AsTheyAre>
      : is_half
          ? (is_e4m3 ? launch_copy<Widened<__half, __NV_E4M3>> : launch_copy<Widened<__half, __NV_E5M2>>)
          : (is_e4m3 ? launch_copy<Widened<__nv_bfloat16, __NV_E4M3>> : launch_copy<Widened<__nv_bfloat16, __NV_E5M2>>);
  launch(params, p.batch, p.device, stream);
  plan.widened->run(*plan.widened, wide, at(places.rest), stream);
}

}  // namespace

KvcacheKernel widened_kernel() {
  return copy_and_attend;
}

}  // namespace flashtile
