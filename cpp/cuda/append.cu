#include "flashtile/append.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flashtile/cuda/launch.h"
#include "flashtile/params.h"

namespace flashtile {
namespace {

constexpr int kThreads = 128;

/// This copies rows of one tensor to rows of another.
struct Copy {
  const void* from = nullptr;
  void* to = nullptr;
  Strides from_strides, to_strides;
  int heads = 0;
  int head_dim = 0;
};

struct AppendParams {
  Copy k, v, q;
  Spans added;    // rows of k_new and v_new that are appended
  Spans queries;  // rows of q that are rotated
  CachedRows rows;
  Pages pages;
  std::int64_t new_rows = 0;  // rows of k_new over all sequences
  const void* cos = nullptr;  // (positions, R / 2), or null
  const void* sin = nullptr;
  std::int64_t cos_stride = 0, sin_stride = 0;
  int positions = 0;
  int rotary_dim = 0;
  bool interleaved = true;
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

/// Copies all heads of a row. A thread takes two elements at a time: those that are rotated together.
template <class Element>
__device__ void copy_row(Copy const& copy, const Element* from, Element* to, Rotation<Element> const& rotation) {
  const int pairs = copy.head_dim / 2;
  for (int i = threadIdx.x; i < copy.heads * pairs; i += kThreads) {
    const int head = i / pairs, pair = i - head * pairs;
    const bool rotates = 2 * pair < rotation.dim;
    const bool halves = rotates && !rotation.interleaved;
    const int first = halves ? pair : 2 * pair, second = halves ? pair + rotation.dim / 2 : first + 1;
    const Element* const x = from + head * copy.from_strides.head;
    Element* const y = to + head * copy.to_strides.head;
    if (rotates) {
      const float cos = float(rotation.cos[pair]), sin = float(rotation.sin[pair]);
      const float a = float(x[first]), b = float(x[second]);
      y[first] = Element(a * cos - b * sin);
      y[second] = Element(a * sin + b * cos);
    } else {
      y[first] = x[first];
      y[second] = x[second];
    }
  }
}

/// Returns the sequence that has a row of the tensor: the last one that begins at the row or before it.
__device__ int entry_of(Spans const& spans, std::int64_t row) {
  if (!spans.ragged()) return int(row / spans.size);
  return last_where(spans.entries(), [&](int b) { return spans.begins[b] <= row; });
}

/// Runs one thread block for each row of k_new, then one for each row of q.
template <class Element>
__global__ void __launch_bounds__(kThreads) append_rows(const __grid_constant__ AppendParams params) {
  std::int64_t row = blockIdx.x;
  const bool is_query = row >= params.new_rows;
  if (is_query) row -= params.new_rows;
  const Spans& spans = is_query ? params.queries : params.added;
  const int b = entry_of(spans, row);
  const Span span = spans.at(b);
  const int i = int(row - (spans.ragged() ? span.first : std::int64_t(b) * spans.size));
  if (i < 0 || i >= span.used) return;
  const CachedRows::Rows rows = params.rows.at(b);
  const auto copy = [&](Copy const& copy, std::int64_t to, Rotation<Element> const& rotation) {
    copy_row(copy, static_cast<const Element*>(copy.from) + copy.from_strides.at(b, span.first + i),
             static_cast<Element*>(copy.to) + to, rotation);
  };
  if (is_query) {
    copy(params.q, params.q.to_strides.at(b, span.first + i), Rotation<Element>::of(params, rows.end - span.used + i));
  } else if (rows.held + i < rows.end) {
    const Pages::Place place = params.pages.at(b, rows.held + i);
    copy(params.k, params.k.to_strides.at(place.page, place.row), Rotation<Element>::of(params, rows.held + i));
    copy(params.v, params.v.to_strides.at(place.page, place.row), {});
  }
}

}  // namespace

void append(const KvcachePlan& plan, const KvcacheTensors& t, void* memory, Stream stream) {
  const Problem& p = plan.problem;
  const KvcacheProblem& cache = plan.cache;
  AppendParams params{.k = {},
                      .v = {},
                      .q = {},
                      .added = {},
                      .queries = cache.queries(t),
                      .rows = cache.rows(t),
                      .pages = cache.layout(t)};
  std::int64_t blocks = 0;
  if (cache.appends) {
    params.k = {t.k_new.data, t.k_cache.data, Strides::of(t.k_new), Strides::of(t.k_cache), p.heads_k, p.head_dim};
    params.v = {t.v_new.data, t.v_cache.data, Strides::of(t.v_new), Strides::of(t.v_cache), p.heads_k, p.head_dim_v};
    params.added = params.queries;
    if (!p.ragged) params.added.size = cache.seqlen_new;
    params.new_rows = p.ragged ? cache.seqlen_new : std::int64_t{p.batch} * cache.seqlen_new;
    blocks += params.new_rows;
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
    blocks += cache.queries();
  }
  const LaunchShape shape{static_cast<int>(blocks), kThreads, 0};
  if (p.dtype == DType::kFloat16) {
    static KernelHandles handles;
    launch(append_rows<__half>, handles, p.device, shape, params, stream);
  } else {
    static KernelHandles handles;
    launch(append_rows<__nv_bfloat16>, handles, p.device, shape, params, stream);
  }
}

}  // namespace flashtile
