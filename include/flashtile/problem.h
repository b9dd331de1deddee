// What is asked: sizes, types and options of one attention call, after check has found them legal. A plain value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flashtile/math/dropout.h"
#include "flashtile/math/mask.h"
#include "flashtile/tensor_view.h"

namespace flashtile {

/// The options of a call as the caller gave them; an unset optional stands for its default.
struct Options {
  bool causal = false;
  std::optional<std::int64_t> window_left;   // unset: unbounded
  std::optional<std::int64_t> window_right;  // unset: unbounded
  std::optional<double> scale;               // unset: 1/√D
  double softcap = 0;                        // 0: none
  double dropout_p = 0;                      // 0: none
  std::uint64_t seed = 0;                    // of dropout
  bool deterministic = false;                // of the backward
};

/// Tensors of a forward call. `lse`, `alibi_slopes` and `sinks` are optional.
struct ForwardTensors {
  TensorView q;             // (B, S_q, H_q, D)
  TensorView k;             // (B, S_k, H_k, D)
  TensorView v;             // (B, S_k, H_k, D_v)
  TensorView alibi_slopes;  // (H_q) or (B, H_q), float32
  TensorView sinks;         // (H_q), float32
  TensorView out;           // (B, S_q, H_q, D_v)
  TensorView lse;           // (B, H_q, S_q), float32, contiguous
};

/// Tensors of a backward call. `forward.out` and `forward.lse` are what the forward wrote.
struct BackwardTensors {
  ForwardTensors forward;
  TensorView dout;    // like out
  TensorView dlse;    // like lse; optional
  TensorView dq;      // like q; left out where not wanted, as the others
  TensorView dk;      // like k
  TensorView dv;      // like v
  TensorView dsinks;  // (H_q), float32, contiguous
};

struct Problem {
  int batch = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int heads_q = 0;
  int heads_k = 0;
  int head_dim = 0;    // of Q and K
  int head_dim_v = 0;  // of V and the output
  DType dtype = DType::kOther;
  Device device;
  Band band;
  float scale = 0;
  float softcap = 0;  // 0: none
  bool alibi = false;
  bool sinks = false;
  Dropout dropout;
  bool deterministic = false;  // of the backward

  Lengths lengths() const { return {seqlen_q, seqlen_k}; }
  int group() const { return heads_q / heads_k; }  // query heads per KV head
  int wider_head_dim() const { return head_dim > head_dim_v ? head_dim : head_dim_v; }

  /// Visible (row, column) pairs of one head.
  std::int64_t visible_elements() const;

  bool operator==(const Problem&) const = default;
};

std::string to_string(const Problem& problem);

}  // namespace flashtile
