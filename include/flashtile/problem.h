// This file holds what is asked: sizes, types and options of one attention call, after check has found them legal. All
// of it is plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flashtile/mask/mask.h"
#include "flashtile/math/dropout.h"
#include "flashtile/math/softmax.h"
#include "flashtile/sequence.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// These are the options of a call as the caller gave them; an unset optional stands for its default.
struct Options {
  bool causal = false;
  std::optional<std::int64_t> window_left;   // unset: unbounded
  std::optional<std::int64_t> window_right;  // unset: unbounded
  std::optional<double> scale;               // unset: 1/√D
  double softcap = 0;                        // 0: none
  double dropout_p = 0;                      // 0: none
  std::uint64_t seed = 0;                    // seed of dropout's random numbers
  std::optional<bool> deterministic;         // whether a backward gives the same bits in every run; unset: false
  // Where the call lies in a larger one, of which it is a part: the element from which dropout counts, and how far
  // ALiBi's diagonal is ahead (see Mask).
  Place first;
  int ahead = 0;
  // `fp8` says that float32 numbers stand for e4m3 ones (see Problem), out_dtype is kOther where none is given.
  bool fp8 = false;
  DType out_dtype = DType::kOther;

  /// Calls `visit` with the name and the value of each option. The bindings read options by this, so the order is that
  /// in which Python hands them over (_options.py).
  template <class Visit>
  constexpr void each(Visit&& visit) {
    each_of_scores(visit);
    visit("dropout_p", dropout_p);
    visit("seed", seed);
    visit("deterministic", deterministic);
  }

  /// Does the same for the options that attention over a cache has too.
  template <class Visit>
  constexpr void each_of_scores(Visit&& visit) {
    visit("causal", causal);
    visit("window", window_left, window_right);
    visit("scale", scale);
    visit("softcap", softcap);
  }
};

/// These are the tensors of a forward call. `lse`, `state`, `max_logits`, `alibi_slopes`, `sinks`, `mask` and all of
/// the second part are optional.
///
/// With `cu_seqlens_q` and `cu_seqlens_k` the batch is ragged: its B sequences, of different lengths, are concatenated
/// in q, k, v and out, which have T_q or T_k rows and no batch dimension. lse is then (H_q, T_q), and state (2, H_q,
/// T_q).
struct ForwardTensors {
  TensorView q;             // (B, S_q, H_q, D)
  TensorView k;             // (B, S_k, H_k, D)
  TensorView v;             // (B, S_k, H_k, D_v)
  TensorView alibi_slopes;  // (H_q) or (B, H_q), float32
  TensorView sinks;         // (H_q), float32
  TensorView mask;          // (B or 1, H, S_k, 4), int32, see HiddenRows; H is 1, H_k or H_q; ragged: (1, H, T_k, 4)
  TensorView out;           // (B, S_q, H_q, D_v)
  TensorView lse;           // (B, H_q, S_q), float32, contiguous
  TensorView state;         // (2, B, H_q, S_q), float32, contiguous: what a backward needs of each row, see FinishedRow
  TensorView max_logits;    // (B, H_q), float32, contiguous: the largest score of each head

  TensorView cu_seqlens_q;  // (B + 1), int32, contiguous: where sequences begin, and where the last one ends
  TensorView cu_seqlens_k;  // (B + 1), int32, contiguous
  TensorView seqused_q;     // (B), int32, contiguous: how many rows of a sequence count
  TensorView seqused_k;     // (B), int32, contiguous

  // Of e4m3 numbers these are the factors of blocks of 64 or 128 rows, or of all rows of a head where they have no last
  // dimension; those of q may be for each KV head. All are optional, float32, of any strides.
  TensorView q_descale;  // (B, H_q or H_k, ceil(S_q / block)) or (B, H_q or H_k)
  TensorView k_descale;  // (B, H_k, ceil(S_k / block)) or (B, H_k)
  TensorView v_descale;  // likewise

  /// Returns the same tensors, with a batch dimension of one entry where the batch is ragged: kernels know one kind of
  /// shape.
  ForwardTensors with_batch() const;
};

/// These are the tensors of a backward call. `forward.out` and `forward.state` are what the forward wrote. Without the
/// state, weights are recomputed from `forward.lse`, one float32 a row, which is too coarse where scores are large.
struct BackwardTensors {
  ForwardTensors forward;
  TensorView dout;    // like out
  TensorView dlse;    // like lse; optional
  TensorView dq;      // like q; left out where it is not wanted, as the others
  TensorView dk;      // like k
  TensorView dv;      // like v
  TensorView dsinks;  // (H_q), float32, contiguous

  BackwardTensors with_batch() const;
};

struct Problem {
  int batch = 0;     // entries of a dense batch, or sequences of a ragged one
  int seqlen_q = 0;  // of a ragged batch, rows of all sequences together, as seqlen_k
  int seqlen_k = 0;
  bool ragged = false;
  int heads_q = 0;
  int heads_k = 0;
  int head_dim = 0;    // of Q and K
  int head_dim_v = 0;  // of V and the output
  DType dtype = DType::kOther;
  Device device;
  Band band;
  int ahead = 0;           // see Mask
  int masks_of_entry = 0;  // heads of the column mask, 0: there is none,
  int masked_entries = 0;  // and the batch entries that it tells apart: all, or 1
  float scale = 0;
  float softcap = 0;  // 0: none
  bool alibi = false;
  bool sinks = false;
  bool max_logits = false;  // whether the largest logit of each head is wanted
  Dropout dropout;
  bool deterministic = false;  // whether a backward gives the same bits in every run
  // Whether q, k and v are e4m3 numbers, and weights are rounded to such; on a CPU q, k and v are float32, which have
  // been multiplied with their descales. `out_dtype` is the dtype of out, which is that of q in all other calls.
  bool fp8 = false;
  DType out_dtype = DType::kOther;

  Lengths lengths() const { return {seqlen_q, seqlen_k}; }
  Mask mask() const { return {band, ahead}; }
  bool column_masked() const { return masks_of_entry > 0; }
  ScoreMap score_map() const { return ScoreMap::of(scale, softcap, alibi); }
  int group() const { return heads_q / heads_k; }  // query heads per KV head
  std::int64_t query_rows() const { return std::int64_t{heads_q} * (ragged ? 1 : batch) * seqlen_q; }  // over all heads
  int wider_head_dim() const { return head_dim > head_dim_v ? head_dim : head_dim_v; }

  /// Returns where the rows of each batch entry lie in `tensors`.
  Sequences sequences(const ForwardTensors& tensors) const;

  /// Returns how many slots one head needs for tiles of `tile` rows: see Spans.
  std::int64_t places_q(int tile) const { return places(seqlen_q, tile); }
  std::int64_t places_k(int tile) const { return places(seqlen_k, tile); }

  /// Returns this problem, or for a ragged batch a dense one of the same size, by which estimates go, as the host does
  /// not know the sequences' lengths.
  Problem dense() const;

  /// Returns the number of visible (row, column) pairs in one head of one entry of a dense batch.
  std::int64_t visible_elements() const;

  bool operator==(const Problem&) const = default;

 private:
  std::int64_t places(int rows, int tile) const {
    constexpr int kBegins[1] = {0};  // only says that the batch is ragged: places() reads no table
    return Spans{batch, rows, ragged ? kBegins : nullptr}.places(tile);
  }
};

std::string to_string(const Problem& problem);

}  // namespace flashtile
