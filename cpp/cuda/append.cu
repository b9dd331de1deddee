#include "flashtile/append.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "flashtile/cuda/divisor.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/params.h"

namespace flashtile {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kPairsOfLane = 4;  // of a row of at most 256 elements
constexpr int kChunk = 8;        // elements that a thread copies at once, where all rows are aligned to as many

/// This copies rows of one tensor to rows of another.
struct Copy {
  const void* from = nullptr;
  void* to = nullptr;
  Strides from_strides, to_strides;
  int heads = 0;
  int head_dim = 0;
  CacheDescales descales = {};  // where they become numbers of 8 bits

  /// Returns how many chunks, or pairs of elements, all heads of a row have.
  int pieces(bool in_chunks) const { return heads * head_dim / (in_chunks ? kChunk : 2); }
  bool has_chunks() const {
    const auto is_aligned = [](const void* data, const Strides& strides) {
      const bool whole = strides.batch % kChunk == 0 && strides.row % kChunk == 0 && strides.head % kChunk == 0;
      return whole && reinterpret_cast<std::uintptr_t>(data) % sizeof(uint4) == 0;
    };
    return head_dim % kChunk == 0 && is_aligned(from, from_strides) && is_aligned(to, to_strides);
  }
};

struct AppendParams {
  Copy k, v, q;
  Spans added;    // rows of k_new and v_new that are appended
  Spans queries;  // rows of q that are rotated
  CachedRows rows;
  Pages pages;
  std::int64_t new_rows = 0, query_rows = 0;  // of k_new and of q, over all sequences
  const void* cos = nullptr;                  // (positions, R / 2), or null
  const void* sin = nullptr;
  std::int64_t cos_stride = 0, sin_stride = 0;
  int positions = 0;
  int rotary_dim = 0;
  bool interleaved = true;
  // A thread block has rows of k_new, or, behind those, of q: as many as there are threads for at a time.
  bool in_chunks = false;
  Divisor threads_of_new, threads_of_query;
  int blocks_of_new = 0;
};

/// These are the angles of one row; there are none where it is copied as it is.
template <class Element>
struct Rotation {
  const Element* cos = nullptr;
  const Element* sin = nullptr;
  int dim = 0;
  bool interleaved = true;

  __device__ static Rotation of(AppendParams const& params, int position) {
    if (params.cos == nullptr) return {};
    const std::int64_t row = min(max(position, 0), params.positions - 1);
    return {static_cast<const Element*>(params.cos) + row * params.cos_stride,
            static_cast<const Element*>(params.sin) + row * params.sin_stride, params.rotary_dim, params.interleaved};
  }
};

/// Rotates two elements by the angle of this index.
template <class Element>
__device__ void rotate(Element& first, Element& second, Rotation<Element> const& rotation, int index) {
  const float cos = float(rotation.cos[index]), sin = float(rotation.sin[index]);
  const float a = float(first), b = float(second);
  first = Element(a * cos - b * sin);
  second = Element(a * sin + b * cos);
}

/// Two elements of a row are rotated together, and copied together.
template <class Element>
struct Pair {
  int first, second;  // columns
  Element a, b;

  __device__ static Pair rotated(const Element* row, int index, Rotation<Element> const& rotation) {
    const bool rotates = 2 * index < rotation.dim;
    const bool halves = rotates && !rotation.interleaved;
    Pair pair;
    pair.first = halves ? index : 2 * index;
    pair.second = halves ? index + rotation.dim / 2 : pair.first + 1;
    pair.a = row[pair.first];
    pair.b = row[pair.second];
    if (rotates) rotate(pair.a, pair.b, rotation, index);
    return pair;
  }
};

/// Chunks of two halves of a row, or of what lies together, are rotated together.
template <class Element>
__device__ void copy_chunk(const Element* from, Element* to, int index, Rotation<Element> const& rotation) {
  const int column = index * kChunk, half = rotation.dim / 2;
  alignas(uint4) Element chunk[kChunk];
  *reinterpret_cast<uint4*>(chunk) = *reinterpret_cast<const uint4*>(from + column);
  if (column < rotation.dim && rotation.interleaved) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 2) rotate(chunk[i], chunk[i + 1], rotation, (column + i) / 2);
  } else if (column < half) {
    alignas(uint4) Element second[kChunk];
    *reinterpret_cast<uint4*>(second) = *reinterpret_cast<const uint4*>(from + half + column);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) rotate(chunk[i], second[i], rotation, column + i);
    *reinterpret_cast<uint4*>(to + half + column) = *reinterpret_cast<const uint4*>(second);
  } else if (column < rotation.dim) {
    return;  // a second half
  }
  *reinterpret_cast<uint4*>(to + column) = *reinterpret_cast<const uint4*>(chunk);
}

/// Copies all heads of a row. The calling thread is one of several, which take a chunk, or a pair, at a time.
template <class Element>
__device__ void copy_row(Copy const& copy, const Element* from, Element* to, Rotation<Element> const& rotation,
                         bool in_chunks, int thread, int threads) {
  const int of_head = copy.head_dim / (in_chunks ? kChunk : 2);
  for (int i = thread; i < copy.heads * of_head; i += threads) {
    const int head = i / of_head, index = i - head * of_head;
    const Element* const x = from + head * copy.from_strides.head;
    Element* const y = to + head * copy.to_strides.head;
    if (in_chunks) {
      copy_chunk(x, y, index, rotation);
    } else {
      const auto pair = Pair<Element>::rotated(x, index, rotation);
      y[pair.first] = pair.a;
      y[pair.second] = pair.b;
    }
  }
}

/// Rounds to the nearest number; what is beyond the largest becomes that, and 0 / 0 is 0.
template <class Number>
__device__ Number narrowed(float x, float descale) {
  constexpr auto kKind = std::is_same_v<Number, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
  Number number;
  number.__x = __nv_cvt_float_to_fp8(x == 0 ? x : __fdiv_rn(x, descale), __NV_SATFINITE, kKind);
  return number;
}

/// Writes all heads of a row as numbers of 8 bits, by a warp for each head. Where each row has a descale, it gets the
/// one with which its largest finite element becomes the largest number.
template <class Number, class Element>
__device__ void narrow_row(Copy const& copy, const Element* from, Number* to, Rotation<Element> const& rotation, int b,
                           Pages::Place place) {
  constexpr float kLargest = std::is_same_v<Number, __nv_fp8_e4m3> ? 448 : 57344;
  constexpr float kLeast = 0x1p-126f;
  const int pairs = copy.head_dim / 2, lane = threadIdx.x % 32;
  for (int head = int(threadIdx.x) / 32; head < copy.heads; head += kWarps) {
    Pair<Element> own[kPairsOfLane];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kPairsOfLane; ++i) {
      const int index = lane + 32 * i;
      if (index >= pairs) break;
      own[i] = Pair<Element>::rotated(from + head * copy.from_strides.head, index, rotation);
      for (const float x : {fabsf(float(own[i].a)), fabsf(float(own[i].b))})
        if (x < __builtin_huge_valf()) largest = fmaxf(largest, x);
    }
    if (copy.descales.of_rows) {
      largest = __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(largest)));
      const float descale = largest == 0 ? 0.0f : fmaxf(__fdiv_rn(largest, kLargest), kLeast);
      if (lane == 0) *copy.descales.at(b, head, place) = descale;
      __syncwarp();  // the lanes read it
    }
    const float descale = copy.descales.of(b, head, place);
    Number* const y = to + head * copy.to_strides.head;
#pragma unroll
    for (int i = 0; i < kPairsOfLane; ++i) {
      if (lane + 32 * i >= pairs) break;
      y[own[i].first] = narrowed<Number>(float(own[i].a), descale);
      y[own[i].second] = narrowed<Number>(float(own[i].b), descale);
    }
  }
}

/// Returns the sequence that has a row of the tensor: the last one that begins at the row or before it.
__device__ int entry_of(Spans const& spans, std::int64_t row) {
  if (!spans.ragged()) return int(row / spans.size);
  return last_where(spans.entries(), [&](int b) { return spans.begins[b] <= row; });
}

/// Appends rows of k_new and rotates rows of q. The cache holds `Stored`.
template <class Element, class Stored>
__global__ void __launch_bounds__(kThreads) append_rows(const __grid_constant__ AppendParams params) {
  const bool is_query = int(blockIdx.x) >= params.blocks_of_new;
  const Divisor threads = is_query ? params.threads_of_query : params.threads_of_new;
  const int of_block = kThreads / threads.value;
  const int within = threads.quotient(threadIdx.x), thread = threads.remainder(threadIdx.x);
  const std::int64_t row = std::int64_t(blockIdx.x - (is_query ? params.blocks_of_new : 0)) * of_block + within;
  if (within >= of_block || row >= (is_query ? params.query_rows : params.new_rows)) return;
  const Spans& spans = is_query ? params.queries : params.added;
  const int b = entry_of(spans, row);
  const Span span = spans.at(b);
  const int i = int(row - (spans.ragged() ? span.first : std::int64_t(b) * spans.size));
  if (i < 0 || i >= span.used) return;
  const CachedRows::Rows rows = params.rows.at(b);
  const auto source = [&](Copy const& copy) {
    return static_cast<const Element*>(copy.from) + copy.from_strides.at(b, span.first + i);
  };
  const auto store = [&](Copy const& copy, Pages::Place place, Rotation<Element> const& rotation) {
    Stored* const to = static_cast<Stored*>(copy.to) + copy.to_strides.at(place.page, place.row);
    if constexpr (std::is_same_v<Stored, Element>)
      copy_row(copy, source(copy), to, rotation, params.in_chunks, thread, threads.value);
    else
      narrow_row(copy, source(copy), to, rotation, b, place);
  };
  if (is_query) {
    Element* const to = static_cast<Element*>(params.q.to) + params.q.to_strides.at(b, span.first + i);
    const auto rotation = Rotation<Element>::of(params, rows.end - span.used + i);
    copy_row(params.q, source(params.q), to, rotation, params.in_chunks, thread, threads.value);
  } else if (rows.held + i < rows.end) {
    const Pages::Place place = params.pages.at(b, rows.held + i);
    store(params.k, place, Rotation<Element>::of(params, rows.held + i));
    store(params.v, place, {});
  }
}

template <class Element, class Stored>
void launch_append(const AppendParams& params, Device device, std::int64_t blocks, Stream stream) {
  static KernelHandles handles;
  launch(append_rows<Element, Stored>, handles, device, {static_cast<int>(blocks), kThreads, 0}, params, stream);
}

template <class Element>
void launch_append_to(DType stored, const AppendParams& params, Device device, std::int64_t blocks, Stream stream) {
  const auto launch = stored == DType::kE4M3   ? launch_append<Element, __nv_fp8_e4m3>
                      : stored == DType::kE5M2 ? launch_append<Element, __nv_fp8_e5m2>
                                               : launch_append<Element, Element>;
  launch(params, device, blocks, stream);
}

}  // namespace

void append(const KvcachePlan& plan, const KvcacheTensors& t, void* memory, Stream stream) {
  if (plan.comes_second()) return;
  const Problem& p = plan.problem;
  const KvcacheProblem& cache = plan.cache;
  AppendParams params{.k = {},
                      .v = {},
                      .q = {},
                      .added = {},
                      .queries = cache.queries(t),
                      .rows = cache.rows(t),
                      .pages = cache.layout(t)};
  if (cache.appends) {
    params.k = {t.k_new.data, t.k_cache.data, Strides::of(t.k_new),          Strides::of(t.k_cache),
                p.heads_k,    p.head_dim,     CacheDescales::of(t.k_descale)};
    params.v = {t.v_new.data, t.v_cache.data, Strides::of(t.v_new),          Strides::of(t.v_cache),
                p.heads_k,    p.head_dim_v,   CacheDescales::of(t.v_descale)};
    params.added = params.queries;
    if (!p.ragged) params.added.size = cache.seqlen_new;
    params.new_rows = p.ragged ? cache.seqlen_new : std::int64_t{p.batch} * cache.seqlen_new;
  }
  if (cache.rotary_dim > 0) {
    const std::int64_t row = std::int64_t{p.heads_q} * p.head_dim;
    params.q = {t.q.data,         static_cast<char*>(memory) + plan.rotated_at,
                Strides::of(t.q), {p.ragged ? 0 : p.seqlen_q * row, row, p.head_dim},
                p.heads_q,        p.head_dim};
    params.cos = t.rotary_cos.data;
    params.sin = t.rotary_sin.data;
    params.cos_stride = t.rotary_cos.strides[0];
    params.sin_stride = t.rotary_sin.strides[0];
    params.positions = cache.rotary_rows;
    params.rotary_dim = cache.rotary_dim;
    params.interleaved = cache.rotary_interleaved;
    params.query_rows = cache.queries();
  }
  // Numbers of 8 bits are written by whole warps, each of a head.
  const bool narrows = cache.stored() != p.dtype;
  const auto has_chunks = [](const Copy& copy) { return copy.heads == 0 || copy.has_chunks(); };
  params.in_chunks = has_chunks(params.q) && (narrows || (has_chunks(params.k) && has_chunks(params.v)));
  const auto threads_of = [&](const Copy& copy) { return std::min(copy.pieces(params.in_chunks), kThreads); };
  params.threads_of_new = Divisor(narrows ? kThreads : std::max(threads_of(params.k), threads_of(params.v)));
  params.threads_of_query = Divisor(threads_of(params.q));
  const auto blocks_of = [](std::int64_t rows, const Divisor& threads) {
    const int of_block = kThreads / threads.value;
    return (rows + of_block - 1) / of_block;
  };
  params.blocks_of_new = static_cast<int>(blocks_of(params.new_rows, params.threads_of_new));
  const std::int64_t blocks = params.blocks_of_new + blocks_of(params.query_rows, params.threads_of_query);
  (p.dtype == DType::kFloat16 ? launch_append_to<__half> : launch_append_to<__nv_bfloat16>)(cache.stored(), params,
                                                                                            p.device, blocks, stream);
}

}  // namespace flashtile
