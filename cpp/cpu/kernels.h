// What the host code of the CPU backend (forward.cpp, backward.cpp, kvcache.cpp: batches, heads, masks, threads) asks
// of the code that is compiled once per instruction set (kernels.cpp: arithmetic on one tile). Plain data only, see
// simd.h.
//
// Scores are kept transposed, S^T = K·Q^T: a row per key and a SIMD lane per query. So softmax needs no sum across
// lanes, K is read in its own order, and P^T and dS^T are the left operands that dV = P^T·dO and dK = dS^T·Q want.
#pragma once

#include <cstdint>

#include "flashtile/math/mask.h"
#include "flashtile/math/softmax.h"
#include "flashtile/tensor_view.h"

namespace flashtile::cpu {

/// Rows are padded to whole registers of the widest instruction set.
inline constexpr int kLanePadding = 16;

/// Rows of one head in the caller's memory.
struct HeadRows {
  void* data;
  std::int64_t stride;  // from row to row, in elements
  // Where rows lie apart, where each begins, in elements: instead of the stride. Keys, values, q and out may.
  const std::int64_t* starts = nullptr;
};

/// How a raw score becomes a score: ScoreMap, and one head's ALiBi slope.
struct Scores {
  ScoreMap map;
  float slope;
};

/// Which elements of an edge tile are visible, in the tile's own indices; null: all of them.
struct Visible {
  const Range* queries_of_key;
  const Range* keys_of_query;
};

/// One tile: queries × keys.
struct Tile {
  int queries;
  int keys;
  int distance;  // key 0 minus the diagonal of query 0
  Visible visible;
  const float* dropout;  // (N, M), what each weight is multiplied with; null: none is dropped
};

/// Sizes that fix the layout of a thread's buffers.
struct Sizes {
  int tile_m;
  int tile_n;
  int head_dim;
  int head_dim_v;
};

/// One thread's memory for the forward; counts are of 32-bit words.
struct ForwardBuffers {
  float* queries;             // (M, D)
  float* queries_transposed;  // (D, M)
  float* keys;                // (N, D)
  float* values;              // (N, D_v)
  float* value_steps;         // (N, D_v), in the order that a matmul contracts over keys
  float* scores;              // (N, M)
  float* probabilities;       // (N, M), in the order that a matmul contracts over keys
  float* out;                 // (M, D_v)
  float* reference;           // (M), RowState
  float* sum;                 // (M), RowState
  float* rescale;             // (M), what `out` is multiplied with next
  float* shield;              // (N, D_v), see contract_shielded
};

struct ForwardBlock {
  Sizes sizes;
  Scores scores;
  int queries;  // or rows, where heads are packed: see PackedHeads
  HeadRows q;
  HeadRows out;
  ForwardBuffers buffers;
};

/// One thread's memory for the backward, in 32-bit words. `…_steps`: in the order that a matmul contracts over rows.
struct BackwardBuffers {
  float* queries;             // (M, D)
  float* queries_transposed;  // (D, M)
  float* query_steps;         // (M, D)
  float* dout;                // (M, D_v)
  float* dout_transposed;     // (D_v, M)
  float* dout_steps;          // (M, D_v)
  float* keys;                // (N, D)
  float* key_steps;           // (N, D)
  float* values;              // (N, D_v)
  float* scores;              // (N, M), then P^T
  float* dprobabilities;      // (N, M), then dS^T
  float* probabilities;       // (N, M), P^T as the left operand of dV
  float* dscores;             // (N, M), dS^T as the left operand of dK
  float* dscore_steps;        // (N, M), dS^T as the left operand of dQ
  float* dk;                  // (N, D)
  float* dv;                  // (N, D_v)
  float* shield;              // (max(M, N), max(D, D_v)), see contract_shielded
};

struct Wanted {
  bool dq;
  bool dk;
  bool dv;
};

struct BackwardTile {
  Sizes sizes;
  Scores scores;
  Wanted wanted;
  Tile tile;
  const float* reference;  // of the tile's queries, as log2_sum: FinishedRow; but a log2_sum of +inf: it sees nothing
  const float* log2_sum;
  const float* delta;  // of the tile's queries: rowsum(dO∘O) − dlse
  float* dq;           // (M, D) accumulator
  BackwardBuffers buffers;
};

/// Rotary embedding (RoFormer, Su et al. 2021) at one position.
struct Rotation {
  const void* cos;  // (pairs)
  const void* sin;
  int pairs;         // at most kMostPairs
  bool interleaved;  // pairs are neighbours; else element i and element i + pairs
};
inline constexpr int kMostPairs = 128;

/// The tile arithmetic for one dtype on one instruction set.
struct Kernels {
  void (*forward_begin)(const ForwardBlock&);
  void (*forward_tile)(const ForwardBlock&, const Tile&, HeadRows k, HeadRows v);
  void (*forward_end)(const ForwardBlock&);

  /// The elements of `pairs` pairs, in float32 and rounded once; `target` may be `source`.
  void (*rotate)(void* target, const void* source, const Rotation&);

  void (*load_queries)(const Sizes&, const BackwardBuffers&, int queries, HeadRows q, HeadRows dout);
  void (*load_keys)(const Sizes&, const BackwardBuffers&, int keys, HeadRows k, HeadRows v);
  void (*backward_tile)(const BackwardTile&);
  /// Σ over columns of a∘b, for each of `rows` rows.
  void (*row_dots)(float* sums, HeadRows a, HeadRows b, int rows, int columns);
  /// target = factor · source, rounded to the dtype.
  void (*store_rows)(HeadRows target, const float* source, int rows, int columns, float factor);
};

}  // namespace flashtile::cpu
