// This file answers whether a call on a cache is legal. It holds the rules of caches; those of every attention are in
// check.cpp.
#include <algorithm>
#include <vector>

#include "flashtile/kvcache.h"
#include "operand.h"
#include "options.h"
#include "overlap.h"

namespace flashtile {
namespace {

constexpr const char* kOwnMemory = "a cache of its own memory, as k_new is given";
constexpr Size kRotaryStep = 16;  // R is a multiple of this, so that each table's row is a multiple of 16 bytes

const int* data_of(const TensorView& table) {
  return static_cast<const int*>(table.data);
}

/// Returns whether the rows of a (B, S, H, D) tensor have one stride, from the last row of an entry to the next entry
/// too.
bool has_one_stride(const TensorView& t) {
  return rows_to_next(t) == t.shape[1];
}

/// Checks the sizes of the cache; the block table says how many pages a sequence has.
void check_cache(const Operand& k, const Operand& block_table, const Operand& cache_batch_idx, KvcacheProblem& cache) {
  const Problem& p = cache.problem;
  const bool paged = block_table.view.given(), indexed = cache_batch_idx.view.given();
  if (paged && indexed) cache_batch_idx.refuse("is given", "none with a block_table");
  const Size pages = k.view.shape[0], page_size = k.view.shape[1];
  Size of_sequence = 1;
  if (paged) {
    block_table.has_rank(2);
    of_sequence = block_table.view.shape[1];
    block_table.has_shape({p.batch, of_sequence}).has_dtype(DType::kInt32).is_on(p.device);
    block_table.has_contiguous_last_dimension();
    if (page_size < 1) k.refuse_shape("pages of at least one row");
    if (of_sequence >= kSizeLimit || of_sequence * page_size >= kSizeLimit)
      block_table.refuse_shape("fewer than 2^30 rows in the pages of a sequence, of " + std::to_string(page_size));
  } else if (indexed) {
    check_table(cache_batch_idx, p.batch, p.device);
  } else if (pages < p.batch) {
    k.refuse_shape("B_cache of at least B = " + std::to_string(p.batch) + " without cache_batch_idx");
  }
  cache.pages = static_cast<int>(pages);
  cache.page_size = static_cast<int>(page_size);
  cache.of_sequence = static_cast<int>(of_sequence);
  cache.problem.seqlen_k = pages == 0 ? 0 : static_cast<int>(of_sequence * page_size);  // no page holds no row
}

void check_new_rows(const Operand& k, const Operand& v, const TensorView& q, KvcacheProblem& cache) {
  if (!k.view.given() && !v.view.given()) return;
  if (!v.view.given()) v.refuse("is missing", "a tensor, as k_new is given");
  if (!k.view.given()) k.refuse("is missing", "a tensor, as v_new is given");
  const Problem& p = cache.problem;
  k.has_rank(p.ragged ? 3 : 4);
  const Size rows = p.ragged ? p.seqlen_q : k.view.shape[1];
  has_rows(k, p, rows, p.heads_k, p.head_dim).is_matrix_like(q);
  has_rows(v, p, rows, p.heads_k, p.head_dim_v).is_matrix_like(q);
  check_sizes(k);
  cache.appends = true;
  cache.seqlen_new = static_cast<int>(rows);
}

bool same_memory(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.shape == b.shape && a.strides == b.strides;
}

/// Checks that new values do not overwrite keys. One tensor may be both caches if what is written to it is both too.
void check_apart(const Operand& k, const Operand& v, const KvcacheTensors& t, const KvcacheProblem& cache) {
  if (!share_elements(k.view, v.view)) return;
  if (same_memory(k.view, v.view) && same_memory(t.k_new, t.v_new) && cache.rotary_dim == 0) return;
  v.refuse("shares memory with k_cache", kOwnMemory);
}

/// Checks that what is read while new rows are written is not what they are written to.
void check_written(const Operand& k, const Operand& v, const KvcacheTensors& t, const KvcacheProblem& cache) {
  k.is_writable(kOwnMemory);
  v.is_writable(kOwnMemory);
  const Stretch keys = stretch_of(k.view), values = stretch_of(v.view);
  if (keys.meets(values)) check_apart(k, v, t, cache);
  const auto check_outside = [&](const char* name, const TensorView& read) {
    const Stretch stretch = stretch_of(read);
    if (stretch.meets(keys) || stretch.meets(values))
      refuse<Unreadable>(k.function, name, "lies in the memory of a cache", "memory of its own, as k_new is given");
  };
  check_outside("q", t.q);
  check_outside("k_new", t.k_new);
  check_outside("v_new", t.v_new);
  check_outside("rotary_cos", t.rotary_cos);
  check_outside("rotary_sin", t.rotary_sin);
}

/// Checks the dtype of keys and values: that of q, or one of 8 bits.
void check_dtypes(const Operand& k, const Operand& v, const TensorView& q, KvcacheProblem& cache) {
  if (!is_fp8(k.view.dtype)) {
    k.is_matrix_like(q);
    v.is_matrix_like(q);
    return;
  }
  cache.narrow = k.view.dtype;
  k.lies_like(q);
  v.has_dtype(cache.stored(), ", as k_cache").lies_like(q);
  check_whole_rows(k);
  check_whole_rows(v);
}

/// Checks what 8-bit numbers of a cache are multiplied with.
void check_descales(const Operand& descale, const TensorView& of, const KvcacheProblem& cache) {
  const TensorView& t = descale.view;
  if (!t.given()) return;
  const Problem& p = cache.problem;
  if (!is_fp8(cache.stored()))
    descale.refuse("is given", std::string("none with caches of dtype ") + name_of(cache.stored()));
  descale.has_dtype(DType::kFloat32).is_on(p.device);
  const Size per_head[] = {p.batch, p.heads_k};
  const bool fits = t.rank == 0 || (t.rank == 1 && t.shape[0] == 1) ||
                    (t.rank == 2 && std::equal(per_head, per_head + 2, t.shape.begin())) ||
                    (t.rank == 3 && std::equal(of.shape.begin(), of.shape.begin() + 3, t.shape.begin()));
  if (!fits)
    descale.refuse_shape("(1), " + shape_string(per_head, 2) + " = (B, H_k) or " + shape_string(of.shape.data(), 3) +
                         ", that of the cache without its last dimension");
}

/// Descales of rows are all of keys and of values, or none; new rows get theirs.
void check_descales_of_rows(const Operand& k, const Operand& v, const KvcacheProblem& cache) {
  if ((k.view.rank == 3) != (v.view.rank == 3))
    v.refuse(v.view.given() ? "has shape " + shape_string(v.view) : "is missing",
             k.view.rank == 3 ? "one for each row, as k_descale" : "none of them for each row, as k_descale");
  if (!cache.appends || k.view.rank != 3) return;
  k.is_writable(kOwnMemory);
  v.is_writable(kOwnMemory);
  if (stretch_of(k.view).meets(stretch_of(v.view)) && share_elements(k.view, v.view))
    v.refuse("shares memory with k_descale", "descales of its own memory, as k_new is given");
}

/// The mask has as many columns as it likes, and they are the last keys of each sequence, however many the host may not
/// know.
void check_mask_of_last_keys(const Operand& mask, KvcacheProblem& cache) {
  mask.has_rank(4);
  check_sizes(mask);
  check_columns(mask, true, mask.view.shape[2], cache.problem);
  cache.masked_keys = static_cast<int>(mask.view.shape[2]);
}

void check_rotary(const Operand& cos, const Operand& sin, const TensorView& q, KvcacheProblem& cache) {
  if (!cos.view.given() && !sin.view.given()) return;
  if (!sin.view.given()) sin.refuse("is missing", "a tensor, as rotary_cos is given");
  if (!cos.view.given()) cos.refuse("is missing", "a tensor, as rotary_sin is given");
  cos.has_rank(2).is_matrix_like(q);
  const Size positions = cos.view.shape[0], dim = 2 * cos.view.shape[1];
  if (dim % kRotaryStep != 0 || dim < kRotaryStep || dim > cache.problem.head_dim)
    cos.refuse_shape("R to be a multiple of 16 from 16 to D = " + std::to_string(cache.problem.head_dim));
  if (positions < 1) cos.refuse_shape("at least one position");
  check_sizes(cos);
  sin.has_shape({positions, dim / 2}).is_matrix_like(q);
  cache.rotary_dim = static_cast<int>(dim);
  cache.rotary_rows = static_cast<int>(positions);
}

/// This checks the contents of tables on the CPU. On a GPU the host cannot see them, and kernels stay inside the
/// tensors whatever they hold.
class Values {
 public:
  Values(const char* function, const KvcacheTensors& tensors, const KvcacheProblem& cache)
      : function_(function), t_(tensors), cache_(cache), queries_(cache.queries(tensors)), rows_(cache.rows(tensors)) {}

  void check() const {
    for (int b = 0; b < cache_.problem.batch; ++b) {
      check_lengths(b);
      if (t_.block_table.given()) check_pages(b);
      if (cache_.rotary_dim > 0) check_positions(b);
    }
    if (t_.block_table.given() && cache_.appends) check_written_pages();
    if (t_.cache_batch_idx.given()) check_entries();
  }

 private:
  Operand operand(const char* name, const TensorView& view) const { return {function_, name, "", view}; }

  int added_to(int b) const {
    if (!cache_.appends) return 0;
    return cache_.problem.ragged ? queries_.at(b).used : cache_.seqlen_new;
  }

  void check_lengths(int b) const {
    const int held = data_of(t_.cache_seqlens)[b], added = added_to(b), capacity = cache_.problem.seqlen_k;
    if (held < 0 || held > capacity)
      operand("cache_seqlens", t_.cache_seqlens)
          .refuse(at_index(held, b), "from 0 to " + std::to_string(capacity) + ", what a sequence has room for");
    if (added > capacity - held)
      operand("k_new", t_.k_new)
          .refuse("has " + std::to_string(added) + " rows for the sequence at index " + std::to_string(b),
                  "at most " + std::to_string(capacity - held) + ", what cache_seqlens = " + std::to_string(held) +
                      " leaves of room for " + std::to_string(capacity));
    if (!t_.leftpad.given()) return;
    const int skipped = data_of(t_.leftpad)[b];
    if (skipped < 0 || skipped > held + added)
      operand("leftpad", t_.leftpad)
          .refuse(at_index(skipped, b), "from 0 to the sequence's length " + std::to_string(held + added));
  }

  /// A piece is the rows [first, end) of a page, which stands at `index` in the table of sequence `b`.
  struct Piece {
    int page, b, index, first, end;
  };

  /// Visits the pieces that make up the rows [first, end) of a sequence.
  template <class Visit>
  void for_pieces(int b, int first, int end, Visit&& visit) const {
    const int* const table = data_of(t_.block_table) + b * t_.block_table.strides[0];
    const int size = cache_.page_size;
    for (int row = first; row < end; row = (row / size + 1) * size) {
      const int index = row / size, begin = index * size;
      visit(Piece{table[index], b, index, row - begin, std::min(end - begin, size)});
    }
  }

  /// Visits the pieces of the rows that count or are written.
  template <class Visit>
  void for_used_pieces(int b, Visit&& visit) const {
    const CachedRows::Rows rows = rows_.at(b);
    for_pieces(b, std::min(rows.begin, rows.held), rows.end, visit);
  }

  [[noreturn]] void refuse_page(const Piece& piece, const std::string& expected) const {
    const std::string place = "(" + std::to_string(piece.b) + ", " + std::to_string(piece.index) + ")";
    operand("block_table", t_.block_table).refuse("has " + std::to_string(piece.page) + " at index " + place, expected);
  }

  void check_pages(int b) const {
    for_used_pieces(b, [&](const Piece& piece) {
      if (piece.page < 0 || piece.page >= cache_.pages)
        refuse_page(piece, "from 0 to " + std::to_string(cache_.pages - 1) + ", a page of k_cache");
    });
  }

  /// Checks that a row that is written belongs to one sequence, at one index; pages may be shared otherwise.
  void check_written_pages() const {
    std::vector<Piece> written;
    for (int b = 0; b < cache_.problem.batch; ++b)
      for_pieces(b, rows_.at(b).held, rows_.at(b).end, [&](const Piece& piece) { written.push_back(piece); });
    const auto by_page = [](const Piece& x, const Piece& y) { return x.page < y.page; };
    std::sort(written.begin(), written.end(), by_page);
    for (int b = 0; b < cache_.problem.batch; ++b)
      for_used_pieces(b, [&](const Piece& piece) {
        const auto [first, last] = std::equal_range(written.begin(), written.end(), piece, by_page);
        for (auto other = first; other != last; ++other) {
          const bool itself = other->b == piece.b && other->index == piece.index;
          const int row = std::max(piece.first, other->first);
          if (!itself && row < std::min(piece.end, other->end))
            refuse_page(piece, "another page, as k_new is written to its row " + std::to_string(row) +
                                   " for the sequence at index " + std::to_string(other->b));
        }
      });
  }

  /// Checks the positions of rotated rows, of which the last is the sequence's last. A query before the sequence's
  /// first row sees no key under a causal mask, and may have any position.
  void check_positions(int b) const {
    const int queries = queries_.at(b).used, end = rows_.at(b).end;
    if (queries == 0 && added_to(b) == 0) return;
    if (end > cache_.rotary_rows)
      operand("rotary_cos", t_.rotary_cos)
          .refuse_shape("at least " + std::to_string(end) + " positions, as the sequence at index " +
                        std::to_string(b) + " has");
    if (queries > end && cache_.problem.band.right > 0)
      operand("q", t_.q).refuse(
          "has " + std::to_string(queries) + " rows for the sequence at index " + std::to_string(b),
          "at most " + std::to_string(end) + ", its keys, to rotate them without causal");
  }

  void check_entries() const {
    const Operand entries = operand("cache_batch_idx", t_.cache_batch_idx);
    std::vector<bool> taken(static_cast<std::size_t>(cache_.pages));
    for (int b = 0; b < cache_.problem.batch; ++b) {
      const int entry = data_of(t_.cache_batch_idx)[b];
      if (entry < 0 || entry >= cache_.pages)
        entries.refuse(at_index(entry, b), "from 0 to " + std::to_string(cache_.pages - 1) + ", an entry of k_cache");
      if (taken[entry] && cache_.appends)
        entries.refuse(at_index(entry, b), "another entry for each sequence where k_new is written");
      taken[entry] = true;
    }
  }

  const char* function_;
  const KvcacheTensors& t_;
  const KvcacheProblem& cache_;
  Spans queries_;
  CachedRows rows_;
};

}  // namespace

KvcacheProblem check_kvcache(const char* function, const KvcacheTensors& t, const KvcacheOptions& options) {
  KvcacheProblem cache;
  Problem& p = cache.problem;
  p.ragged = t.cu_seqlens_q.given();
  const bool paged = t.block_table.given();
  const Operand q{function, "q", names_of(p).q, t.q};
  const Operand k{function, "k_cache", paged ? "(pages, page_size, H_k, D)" : "(B_cache, S_cache, H_k, D)", t.k_cache};
  const Operand v{function, "v_cache", paged ? "(pages, page_size, H_k, D_v)" : "(B_cache, S_cache, H_k, D_v)",
                  t.v_cache};
  const int rows = p.ragged ? 0 : 1;  // the dimension of rows, which heads and width follow
  q.has_rank(rows + 3);
  k.has_rank(4);
  v.has_rank(4);
  check_floating(q);
  check_sizes(q);
  const Size heads_k = t.k_cache.shape[2];
  p.batch = static_cast<int>(p.ragged ? batch_of({function, "cu_seqlens_q", "(B + 1)", t.cu_seqlens_q}) : t.q.shape[0]);
  k.has_shape({t.k_cache.shape[0], t.k_cache.shape[1], heads_k, t.q.shape[rows + 2]});
  v.has_shape({t.k_cache.shape[0], t.k_cache.shape[1], heads_k, t.v_cache.shape[3]});
  check_sizes(k);
  check_heads(q, k, t.q.shape[rows + 1], heads_k);
  check_head_dim(q, "D");
  check_head_dim(v, "D_v");
  q.is_matrix_like(t.q);
  check_dtypes(k, v, t.q, cache);
  p.seqlen_q = static_cast<int>(t.q.shape[rows]);
  p.heads_q = static_cast<int>(t.q.shape[rows + 1]);
  p.heads_k = static_cast<int>(heads_k);
  p.head_dim = static_cast<int>(t.q.shape[rows + 2]);
  p.head_dim_v = static_cast<int>(t.v_cache.shape[3]);
  p.dtype = p.out_dtype = t.q.dtype;
  p.device = t.q.device;

  check_cache(k, {function, "block_table", "(B, pages of a sequence)", t.block_table},
              {function, "cache_batch_idx", "(B)", t.cache_batch_idx}, cache);
  cache.has_table = paged || t.cache_batch_idx.given();
  cache.q_in_line = p.ragged || (has_one_stride(t.q) && has_one_stride(t.out));
  cache.has_leftpad = t.leftpad.given();
  cache.in_line = rows_to_next(t.k_cache) > 0 && rows_to_next(t.v_cache) > 0;
  cache.has_gaps = cache.in_line && !(has_one_stride(t.k_cache) && has_one_stride(t.v_cache));
  check_new_rows({function, "k_new", p.ragged ? "(T_q, H_k, D)" : "(B, S_new, H_k, D)", t.k_new},
                 {function, "v_new", p.ragged ? "(T_q, H_k, D_v)" : "(B, S_new, H_k, D_v)", t.v_new}, t.q, cache);
  check_rotary({function, "rotary_cos", "(positions, R / 2)", t.rotary_cos},
               {function, "rotary_sin", "(positions, R / 2)", t.rotary_sin}, t.q, cache);
  if (cache.appends) check_written(k, v, t, cache);
  const Operand k_descale{function, "k_descale", "", t.k_descale}, v_descale{function, "v_descale", "", t.v_descale};
  check_descales(k_descale, t.k_cache, cache);
  check_descales(v_descale, t.v_cache, cache);
  check_descales_of_rows(k_descale, v_descale, cache);
  cache.descales_of_rows = CacheDescales::of(t.k_descale).of_rows;
  check_table({function, "cache_seqlens", "(B)", t.cache_seqlens}, p.batch, p.device);
  if (t.leftpad.given()) check_table({function, "leftpad", "(B)", t.leftpad}, p.batch, p.device);
  if (p.ragged) {
    const TensorView none;
    check_tables({function, "cu_seqlens_q", "(B + 1)", t.cu_seqlens_q}, {function, "seqused_q", "(B)", none}, "T_q",
                 p.seqlen_q, p.batch, p.device);
  }
  if (t.alibi_slopes.given()) check_alibi_slopes(function, t.alibi_slopes, p);
  if (t.sinks.given()) check_per_head(function, "sinks", t.sinks, p);
  if (t.mask.given()) check_mask_of_last_keys({function, "mask", "(1 or B, 1 or H_k or H_q, N, 4)", t.mask}, cache);
  if (t.out.given()) check_out(function, "out", t.out, t.q, p);
  if (t.lse.given()) check_lse(function, "lse", t.lse, p);
  if (t.max_logits.given()) check_max_logits(function, t.max_logits, p);

  check_options(function, options.attention, p);
  p.alibi = t.alibi_slopes.given();
  p.sinks = t.sinks.given();
  p.max_logits = t.max_logits.given();
  cache.rotary_interleaved = options.rotary_interleaved;
  if (options.num_splits < 0)
    refuse<InvalidArgument>(function, "num_splits", "is " + std::to_string(options.num_splits), "at least 0");
  if (options.num_splits > 0 && options.batch_invariant)
    refuse<InvalidArgument>(function, "num_splits", "is " + std::to_string(options.num_splits),
                            "0 with batch_invariant, which has splits of its own");
  // More splits than keys would leave some empty.
  cache.num_splits = static_cast<int>(std::min<Size>(options.num_splits, std::max(p.seqlen_k, 1)));
  cache.batch_invariant = options.batch_invariant;
  if (p.device.type == DeviceType::kCpu) Values(function, t, cache).check();
  return cache;
}

}  // namespace flashtile
