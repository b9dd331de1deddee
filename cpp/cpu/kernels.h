// This file is the interface between the host code of the CPU backend (forward.cpp, backward.cpp, kvcache.cpp: batches,
// heads, masks, threads) and the code that is compiled once per instruction set (kernels.cpp: arithmetic on one tile).
// Only plain data crosses it, see simd.h.
//
// Scores are kept transposed, S^T = K·Q^T: a row per key and a SIMD lane per query. So softmax needs no sum across
// lanes, K is read in its own order, and P^T and dS^T are the left operands that dV = P^T·dO and dK = dS^T·Q want.
#pragma once

#include <cstdint>

#include "flashtile/mask/columns.h"
#include "flashtile/math/softmax.h"
#include "flashtile/range.h"
#include "flashtile/tensor_view.h"

namespace flashtile::cpu {

/// Rows are padded to whole registers of the widest instruction set, in floats.
inline constexpr int kLanePadding = 16;

/// These are the rows of one head in the caller's memory.
struct HeadRows {
  void* data;
  std::int64_t stride;  // from row to row, in elements
  // Where rows have no common stride, this says where each begins, in elements, instead. Keys, values, q and out may
  // use it.
  const std::int64_t* starts = nullptr;
};

/// This says how a raw score becomes a score: ScoreMap, and one head's ALiBi slope.
struct Scores {
  ScoreMap map;
  float slope;
};

/// This says which elements of an edge tile are visible, in the tile's own indices; null: all of them. Of those a
/// column mask, if there is one, hides the queries that `hidden` has for each key, counted from `first_query` on.
struct Visible {
  const Range* queries_of_key = nullptr;
  const Range* keys_of_query = nullptr;
  const HiddenRows* hidden = nullptr;
  int first_query = 0;
};

/// This is one tile of queries × keys.
struct Tile {
  int queries;
  int keys;
  int distance;  // key 0 of the tile minus the diagonal of its query 0
  Visible visible;
  const float* dropout;  // (N, M), the factor of each weight; null: there is no dropout
};

/// These sizes fix the layout of a thread's buffers.
struct Sizes {
  int tile_m;
  int tile_n;
  int head_dim;
  int head_dim_v;
};

/// This is one thread's memory for the forward; counts are of 32-bit words.
struct ForwardBuffers {
  float* queries;             // (M, D)
  float* queries_transposed;  // (D, M)
  float* keys;                // (N, D)
  float* values;              // (N, D_v), in the order in which a matmul sums over keys
  float* scores;              // (N, M)
  float* probabilities;       // (N, M), P^T in the order in which a matmul sums over keys
  float* out;                 // (M, D_v)
  float* reference;           // (M), RowState
  float* sum;                 // (M), RowState
  float* rescale;             // (M), the factor that `out` is multiplied with next
  float* shield;              // (N, D_v), see contract_shielded
};

struct ForwardBlock {
  Sizes sizes;
  Scores scores;
  int queries;  // queries, or rows where heads are packed: see PackedHeads
  HeadRows q;
  HeadRows out;
  ForwardBuffers buffers;
};

/// This is one thread's memory for the backward, in 32-bit words. `…_steps` are in the order in which a matmul sums
/// over rows.
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
  // These two are FinishedRow's, of the tile's queries, but here a log2_sum of +inf says that a row sees nothing.
  const float* reference;
  const float* log2_sum;
  const float* delta;  // of the tile's queries: rowsum(dO∘O) − dlse
  float* dq;           // (M, D) accumulator
  BackwardBuffers buffers;
};

/// This is the rotary embedding (RoFormer, Su et al. 2021) at one position.
struct Rotation {
  const void* cos;  // (pairs)
  const void* sin;
  int pairs;         // at most kMostPairs
  bool interleaved;  // a pair is two neighbours; else element i and element i + pairs
};
inline constexpr int kMostPairs = 128;

/// This is the tile arithmetic for one dtype on one instruction set.
struct Kernels {
  void (*forward_begin)(const ForwardBlock&);
  void (*forward_tile)(const ForwardBlock&, const Tile&, HeadRows k, HeadRows v);
  void (*forward_end)(const ForwardBlock&);

  /// Rotates the elements of `pairs` pairs, in float32, rounded once; `target` may be `source`.
  void (*rotate)(void* target, const void* source, const Rotation&);

  /// Rows of a cache, of numbers of 8 bits: target = source · descale, rounded once to the dtype; and back, where what
  /// is beyond the largest number becomes that, and 0 / 0 is 0.
  void (*widen_row)(void* target, const void* source, DType stored, int width, float descale);
  void (*narrow_row)(void* target, const void* source, DType stored, int width, float descale);
  /// Returns the descale with which a row's largest finite number becomes the largest that 8 bits have.
  float (*descale_of_row)(const void* row, DType stored, int width);

  void (*load_queries)(const Sizes&, const BackwardBuffers&, int queries, HeadRows q, HeadRows dout);
  void (*load_keys)(const Sizes&, const BackwardBuffers&, int keys, HeadRows k, HeadRows v);
  void (*backward_tile)(const BackwardTile&);
  /// Computes Σ over columns of a∘b, for each of `rows` rows.
  void (*row_dots)(float* sums, HeadRows a, HeadRows b, int rows, int columns);
  /// Stores target = factor · source, rounded to the dtype.
  void (*store_rows)(HeadRows target, const float* source, int rows, int columns, float factor);
};

}  // namespace flashtile::cpu
