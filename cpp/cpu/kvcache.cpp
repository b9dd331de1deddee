// This file computes attention over a cache: new rows are written to it, then work items are computed as in the
// forward. The keys of a tile need not lie side by side, but tiles are the same wherever they lie, and so is the
// result, bit for bit.
#include "attend.h"
#include "cpu.h"
#include "parallel.h"

namespace flashtile::cpu {
namespace {

/// This is the memory of one thread.
struct ThreadMemory {
  AttendMemory attend;
  std::byte* queries;          // (M, D), rotated, of the caller's dtype
  std::byte* keys;             // (N, D), likewise, of a cache of 8-bit numbers, as the next
  std::byte* values;           // (N, D_v)
  std::byte* row;              // (D), a new key, rotated, before it becomes such numbers
  std::int64_t* key_starts;    // (N)
  std::int64_t* value_starts;  // (N)
  HiddenRows* columns;         // (N), with a column mask
};

ThreadMemory divide(Arena& arena, const Sizes& s, const KvcacheProblem& cache) {
  const bool rotates = cache.rotary_dim > 0, fp8 = is_fp8(cache.stored());
  const int size = bytes_of(cache.problem.dtype);
  return {.attend = take_attend_memory(arena, s, false),
          .queries = arena.take<std::byte>(rotates ? s.tile_m * s.head_dim * size : 0),
          .keys = arena.take<std::byte>(fp8 ? s.tile_n * s.head_dim * size : 0),
          .values = arena.take<std::byte>(fp8 ? s.tile_n * s.head_dim_v * size : 0),
          .row = arena.take<std::byte>(fp8 && rotates ? s.head_dim * size : 0),
          .key_starts = arena.take<std::int64_t>(s.tile_n),
          .value_starts = arena.take<std::int64_t>(s.tile_n),
          .columns = arena.take<HiddenRows>(cache.masked_keys > 0 ? s.tile_n : 0)};
}

std::int64_t thread_bytes(const Sizes& sizes, const KvcacheProblem& cache) {
  Arena arena;
  divide(arena, sizes, cache);
  return arena.bytes();
}

/// All threads share these tables.
struct Tables {
  Items::Entry* items;
  int* counting;  // (entries): keys of each sequence that count
};

Tables take_tables(Arena& arena, const Problem& problem) {
  return {arena.take<Items::Entry>(Items::table_size(problem)), arena.take<int>(std::max(problem.batch, 1))};
}

class Call {
 public:
  Call(const KvcachePlan& plan, const KvcacheTensors& tensors)
      : cache_(plan.cache),
        problem_(plan.problem),
        t_(tensors),
        packed_(plan.packed_heads),
        sizes_(tile_sizes(plan.problem, plan.variant, packed_)),
        queries_(cache_.queries(tensors)),
        cached_(cache_.rows(tensors)),
        pages_(cache_.layout(tensors)),
        masked_(cache_.masked(tensors)),
        k_descales_(CacheDescales::of(tensors.k_descale)),
        v_descales_(CacheDescales::of(tensors.v_descale)) {}

  void append(int threads, void* workspace) const {
    if (!cache_.appends) return;
    const std::int64_t heads = problem_.heads_k;
    parallel_for(threads, problem_.batch * heads, [&](int thread, std::int64_t item) {
      append_head(static_cast<int>(item / heads), static_cast<int>(item % heads), memory_of(thread, workspace).row);
    });
  }

  void attend_all(int threads, void* workspace) const {
    Arena shared(workspace);
    const Tables tables = take_tables(shared, problem_);
    const ForwardTensors queries = query_tensors(tables.counting);
    const Items items(problem_, entries_of(problem_, &queries), tables.items, problem_.heads_q / packed_,
                      [&](const Sequence& rows) { return Spans::tiles(rows.q.size * packed_, sizes_.tile_m); });
    parallel_for(threads, items.count(), [&](int thread, std::int64_t index) {
      const ThreadMemory memory = memory_of(thread, workspace);
      const Item item = items.at(index);
      const PackedHeads heads{packed_, item.head * packed_};
      attend(problem_, queries, sizes_, memory.attend, item, heads, Source{*this, memory, item, heads});
    });
  }

 private:
  ThreadMemory memory_of(int thread, void* workspace) const {
    Arena shared;
    take_tables(shared, problem_);
    Arena arena(static_cast<std::byte*>(workspace) + shared.bytes() + thread * thread_bytes(sizes_, cache_));
    return divide(arena, sizes_, cache_);
  }

  /// Returns the call as a forward's tensors, without keys and values. The keys that count are the used part of each
  /// sequence's capacity; `counting` has room for their numbers.
  ForwardTensors query_tensors(int* counting) const {
    for (int b = 0; b < problem_.batch; ++b) {
      const CachedRows::Rows rows = cached_.at(b);
      counting[b] = rows.end - rows.begin;
    }
    ForwardTensors t{.q = t_.q,
                     .alibi_slopes = t_.alibi_slopes,
                     .sinks = t_.sinks,
                     .out = t_.out,
                     .lse = t_.lse,
                     .max_logits = t_.max_logits,
                     .cu_seqlens_q = t_.cu_seqlens_q};
    t.seqused_k.data = counting;
    return t;
  }

  HeadRows cached_row(const TensorView& cache, int b, int row, int head) const {
    const Pages::Place place = pages_.at(b, row);
    return head_rows(cache, place.page, head, place.row);
  }

  /// Copies one row and rotates its first R elements to a position.
  void copy_rotated(void* target, const void* source, int position) const {
    const int at = std::clamp(position, 0, cache_.rotary_rows - 1), pairs = cache_.rotary_dim / 2;
    const auto angles = [&](const TensorView& table) {
      return static_cast<const std::byte*>(table.data) + at * table.strides[0] * bytes_of(problem_.dtype);
    };
    std::memmove(target, source, static_cast<std::size_t>(problem_.head_dim * bytes_of(problem_.dtype)));
    kernels(problem_).rotate(target, source,
                             {angles(t_.rotary_cos), angles(t_.rotary_sin), pairs, cache_.rotary_interleaved});
  }

  /// Writes a row of the caller's dtype to a cache. Where each row has a descale, it gets one.
  void store(const TensorView& cache, CacheDescales const& descales, int b, int row, int head, const void* source,
             int width) const {
    void* const target = cached_row(cache, b, row, head).data;
    if (!is_fp8(cache_.stored())) {
      std::memmove(target, source, static_cast<std::size_t>(width * bytes_of(problem_.dtype)));
      return;
    }
    const Kernels& kernel = kernels(problem_);
    const Pages::Place place = pages_.at(b, row);
    if (descales.of_rows) *descales.at(b, head, place) = kernel.descale_of_row(source, cache_.stored(), width);
    kernel.narrow_row(target, source, cache_.stored(), width, descales.of(b, head, place));
  }

  /// Appends the new rows of a head. `rotated` has room for a key, where it cannot be rotated in the cache.
  void append_head(int b, int head, std::byte* rotated) const {
    const CachedRows::Rows rows = cached_.at(b);
    const int first = problem_.ragged ? queries_.at(b).first : 0;
    for (int row = rows.held; row < rows.end; ++row) {
      const int added = first + row - rows.held;
      const void* key = head_rows(t_.k_new, b, head, added).data;
      const bool in_cache = !is_fp8(cache_.stored());
      if (cache_.rotary_dim > 0) {
        void* const target = in_cache ? cached_row(t_.k_cache, b, row, head).data : rotated;
        copy_rotated(target, key, row);
        key = target;
      }
      store(t_.k_cache, k_descales_, b, row, head, key, problem_.head_dim);
      store(t_.v_cache, v_descales_, b, row, head, head_rows(t_.v_new, b, head, added).data, problem_.head_dim_v);
    }
  }

  /// This says where the rows of a work item lie: those of q, rotated if need be, and its keys, numbered from the first
  /// that counts; and which of these a column mask has.
  class Source {
   public:
    Source(const Call& call, const ThreadMemory& memory, const Item& item, const PackedHeads& heads)
        : call_(call),
          memory_(memory),
          item_(item),
          heads_(heads),
          head_k_(heads.first / call.problem_.group()),
          cached_(call.cached_.at(item.batch)) {}

    HeadRows queries(Range rows) const {
      const TensorView& q = call_.t_.q;
      const int first = item_.rows.q.first;
      if (call_.cache_.rotary_dim == 0)
        return packed_rows(q, item_.batch, heads_, first, rows, memory_.attend.query_starts);
      const int width = call_.problem_.head_dim, size = bytes_of(call_.problem_.dtype);
      for (int row = rows.begin; row < rows.end; ++row) {
        const int query = heads_.query(row);
        const std::int64_t at = row - rows.begin;
        call_.copy_rotated(memory_.queries + at * width * size,
                           head_rows(q, item_.batch, heads_.head(row), first + query).data,
                           cached_.begin + item_.rows.lengths().diagonal(query));
      }
      return {memory_.queries, width};
    }

    KeyRows keys(Range range) const {
      const KvcacheTensors& t = call_.t_;
      const int b = item_.batch, first = cached_.begin + range.begin, last = cached_.begin + range.end - 1;
      if (is_fp8(call_.cache_.stored())) {
        const Problem& p = call_.problem_;
        return {widened(t.k_cache, call_.k_descales_, first, last, memory_.keys, p.head_dim),
                widened(t.v_cache, call_.v_descales_, first, last, memory_.values, p.head_dim_v)};
      }
      const Pages::Place place = call_.pages_.at(b, first);
      if (place.row + last - first < call_.pages_.size.value)
        return {head_rows(t.k_cache, place.page, head_k_, place.row),
                head_rows(t.v_cache, place.page, head_k_, place.row)};
      for (int row = first; row <= last; ++row) {
        const auto [page, of_page] = call_.pages_.at(b, row);
        memory_.key_starts[row - first] = page * t.k_cache.strides[0] + of_page * t.k_cache.strides[1];
        memory_.value_starts[row - first] = page * t.v_cache.strides[0] + of_page * t.v_cache.strides[1];
      }
      return {{head_rows(t.k_cache, 0, head_k_, 0).data, 0, memory_.key_starts},
              {head_rows(t.v_cache, 0, head_k_, 0).data, 0, memory_.value_starts}};
    }

    const HiddenRows* columns(Range range) const {
      const int keys = item_.rows.lengths().k, first = call_.masked_.first(keys);
      if (range.end <= first) return nullptr;
      const int mask = call_.masked_.ranges.mask_of(heads_.first);
      const HiddenRows* const given = call_.masked_.of_mask(item_.batch, mask, keys);
      for (int key = range.begin; key < range.end; ++key)
        memory_.columns[key - range.begin] = key < first ? HiddenRows{} : given[key - first];
      return memory_.columns;
    }

   private:
    /// Returns the rows from `first` to `last` of a cache of 8-bit numbers, in the caller's dtype, in `memory`.
    HeadRows widened(const TensorView& cache, CacheDescales const& descales, int first, int last, std::byte* memory,
                     int width) const {
      const Kernels& kernel = kernels(call_.problem_);
      const int b = item_.batch, bytes = width * bytes_of(call_.problem_.dtype);
      for (int row = first; row <= last; ++row)
        kernel.widen_row(memory + std::int64_t{row - first} * bytes, call_.cached_row(cache, b, row, head_k_).data,
                         call_.cache_.stored(), width, descales.of(b, head_k_, call_.pages_.at(b, row)));
      return {memory, width};
    }

    const Call& call_;
    const ThreadMemory& memory_;
    const Item& item_;
    PackedHeads heads_;
    int head_k_;
    CachedRows::Rows cached_;
  };

  const KvcacheProblem& cache_;
  const Problem& problem_;
  const KvcacheTensors& t_;
  int packed_;
  Sizes sizes_;
  Spans queries_;
  CachedRows cached_;
  Pages pages_;
  LastColumns masked_;
  CacheDescales k_descales_, v_descales_;
};

}  // namespace

std::int64_t kvcache_workspace_bytes(const KvcachePlan& plan) {
  Arena shared;
  take_tables(shared, plan.problem);
  return shared.bytes() +
         plan.grid * thread_bytes(tile_sizes(plan.problem, plan.variant, plan.packed_heads), plan.cache);
}

void run_kvcache(const KvcachePlan& plan, const KvcacheTensors& tensors, void* workspace, Stream) {
  const Call call(plan, tensors);
  call.append(plan.grid, workspace);
  call.attend_all(plan.grid, workspace);
}

}  // namespace flashtile::cpu
