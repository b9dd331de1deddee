// This file holds the compile-time choices of a kernel, one row of cpp/variants/*.def. A row may become several
// kernels, such as one for ragged sequences and one for dense ones; its launcher then takes the one that the problem
// needs.
#pragma once

#include <string>

#include "flashtile/tensor_view.h"

namespace flashtile {

enum class Arch : std::uint8_t { kCpu, kSm80, kSm90 };

/// This is a set of options that not every row of a table knows on some architecture: their code would slow the other
/// rows down by 2 to 20 % though it is jumped over (docs/performance.md). features_of in cpp/select/choose.h says which
/// of them a problem asks of a row, and so what each means there.
enum class Features : std::uint8_t {
  kNone = 0,
  kDropout = 1,
  kSinks = 2,            // sinks in a forward; every backward knows them
  kOrderedDq = 4,        // in Ampere's backward: dQ is summed in the same order in every run
  kSoftcap = 8,          // in Hopper's backward of one pass: the derivative of softcap
  kUnusualSoftcap = 16,  // known to no row on Hopper, whose tanh is too coarse for it: see choose.cpp
  kColumnMask = 32,      // a column mask, but in rows that may take one anyway: see Variant::may_mask()
  kMaxLogits = 64,       // in Hopper's forward: the largest logit of each head; every kernel for Ampere finds it
  kEvery = 127,
};

constexpr Features operator|(Features a, Features b) {
  return static_cast<Features>(static_cast<int>(a) | static_cast<int>(b));
}

/// Returns whether all of `some` are among `known`.
constexpr bool includes(Features known, Features some) {
  return (known | some) == known;
}

struct Variant {
  Arch arch;
  DType dtype;
  int head_dim;    // the largest D that it serves
  int head_dim_v;  // the largest D_v
  int tile_m;      // query rows of a tile
  int tile_n;      // keys of a tile
  int stages;      // forward: tiles of K and V together in shared memory; backward: tiles of Q, with as many of dO
  int warps;
  Features features = Features::kNone;

  constexpr int threads() const { return warps * 32; }
  constexpr bool knows(Features some) const { return includes(features, some); }
  /// Returns whether it reads numbers of 8 bits: a forward Q, K and V, which its matmuls take as they are, and a kernel
  /// over a cache its keys and values.
  constexpr bool fp8() const { return is_fp8(dtype); }
  /// Returns whether a forward kernel for Ampere exists with twice the warps, too, of 16 rows each instead of 32. They
  /// hide latencies where no multiprocessor has a second thread block that would; elsewhere they read keys twice as
  /// often from shared memory.
  constexpr bool may_double_warps() const {
    return arch == Arch::kSm80 && tile_m == 32 * warps && features == Features::kNone;
  }
  constexpr Variant with_doubled_warps() const {
    Variant v = *this;
    v.warps *= 2;
    return v;
  }
  /// Returns whether a backward kernel forms dQ in a second pass of its own.
  constexpr bool two_passes() const { return arch == Arch::kSm90 && head_dim > 128; }
  /// Returns whether a backward kernel for Hopper forms all gradients in one pass.
  constexpr bool one_pass() const { return arch == Arch::kSm90 && !two_passes(); }
  /// Returns whether a forward kernel for Hopper may divide the keys of a tile among thread blocks. One row of each
  /// width does, that with the smaller tile, and one that finds the largest logits; sinks need no row of their own then
  /// (see join_parts.h).
  constexpr bool may_split() const { return arch == Arch::kSm90 && tile_m == 128 && is_usual() && !fp8(); }
  /// Returns whether a CUDA forward kernel takes column masks. One row of most widths does for Hopper, and on all GPUs
  /// those that know dropout. Heads of other widths take a wider row: each kernel more takes its time to build.
  constexpr bool may_mask() const {
    if (arch == Arch::kSm80) return maps_masked();
    return arch == Arch::kSm90 && has_usual_width() && !fp8() &&
           (maps_masked() || (is_usual() && tile_m == (head_dim > 64 ? 128 : 192)));
  }
  /// Returns whether it maps scores (see ScoreMap) under a column mask. Others would jump over that code at each edge.
  constexpr bool maps_masked() const { return knows(Features::kDropout); }
  /// Returns whether a backward kernel does: those that know dropout, and of Hopper's also most others, at D128 that
  /// with the taller tile.
  constexpr bool may_mask_backward() const {
    if (arch == Arch::kSm80) return knows(Features::kDropout);
    return arch == Arch::kSm90 && has_usual_width() &&
           (two_passes() || features != Features::kNone || !(head_dim == 128 && tile_m == 64));
  }
  /// Returns whether thread blocks of a backward kernel of one pass may take several blocks of keys of a dense batch.
  constexpr bool may_loop() const { return one_pass() && features == Features::kNone; }
  /// Returns into how many parts a backward kernel divides a tile of dQ that is summed in memory: each part has threads
  /// of its own that add it.
  constexpr int parts_of_dq() const { return two_passes() ? 0 : arch == Arch::kSm90 ? 2 : warps; }
  constexpr bool operator==(const Variant&) const = default;

 private:
  constexpr bool has_usual_width() const { return head_dim != 96 && !(head_dim == 192 && head_dim_v == 192); }
  /// Returns whether a forward kernel is that of calls without options, or of those that want the largest logits.
  constexpr bool is_usual() const { return features == Features::kNone || knows(Features::kMaxLogits); }
};

/// Returns the bytes of shared memory of Hopper's backward kernel of two passes. The pass over blocks of 64 keys has a
/// tile of K and one of V, two tiles of 64 rows of Q and of dO with two floats a row, and two of weights. The pass over
/// tiles of queries has one tile of Q and one of dO, two of K, and one of V.
constexpr int backward_shared_memory_two_passes(const Variant& v) {
  constexpr int kBarriers = 1024;
  const int size = bytes_of(v.dtype);
  const int of_keys = size * (3 * 64 * (v.head_dim + v.head_dim_v) + 2 * 64 * 64) + 2 * 8 * 64;
  const int of_queries = size * (v.tile_m * (v.head_dim + v.head_dim_v) + v.tile_n * (2 * v.head_dim + v.head_dim_v));
  return kBarriers + (of_keys > of_queries ? of_keys : of_queries);
}

/// Returns the bytes of shared memory of Hopper's backward kernel of one pass: a tile of K and one of V, `stages` tiles
/// of Q and of dO with two floats a row, two tiles of dS, and one of dQ that is being stored.
constexpr int backward_shared_memory_one_pass(const Variant& v) {
  constexpr int kBarriers = 1024;
  return kBarriers + bytes_of(v.dtype) * (2 * v.head_dim * (v.tile_n + v.stages * v.tile_m) + 2 * v.tile_m * v.tile_n) +
         8 * v.stages * v.tile_m + 4 * v.tile_m * v.head_dim;
}

/// Returns the bytes of shared memory of a CUDA backward kernel; on Ampere these are a tile of K and one of V, `stages`
/// tiles of Q and of dO with two floats a row, P, and dS.
constexpr int backward_shared_memory(const Variant& v) {
  if (v.arch == Arch::kSm90)
    return v.two_passes() ? backward_shared_memory_two_passes(v) : backward_shared_memory_one_pass(v);
  return bytes_of(v.dtype) * (2 * v.head_dim * (v.tile_n + v.stages * v.tile_m) + 2 * v.tile_m * v.tile_n) +
         8 * v.stages * v.tile_m;
}

/// No variant of a CUDA backward kernel has a tile of more query rows: prepare_backward keeps a number of each of them
/// in shared memory.
inline constexpr int kMostRowsOfBackwardTile = 128;

constexpr const char* name_of(Arch arch) {
  return arch == Arch::kCpu ? "cpu" : arch == Arch::kSm80 ? "sm80" : "sm90";
}

/// These are the words of the variant tables.
namespace table {
inline constexpr Arch cpu = Arch::kCpu;
inline constexpr Arch sm80 = Arch::kSm80;
inline constexpr Arch sm90 = Arch::kSm90;
inline constexpr DType f32 = DType::kFloat32;
inline constexpr DType f16 = DType::kFloat16;
inline constexpr DType bf16 = DType::kBFloat16;
inline constexpr DType e4m3 = DType::kE4M3;
inline constexpr DType e5m2 = DType::kE5M2;
inline constexpr Features plain = Features::kNone;
inline constexpr Features sinks = Features::kSinks;
inline constexpr Features sinks_max_logits = Features::kSinks | Features::kMaxLogits;
inline constexpr Features dropout = Features::kDropout;
inline constexpr Features dropout_sinks = Features::kDropout | Features::kSinks;
inline constexpr Features dropout_ordered = Features::kDropout | Features::kOrderedDq;
inline constexpr Features dropout_softcap = Features::kDropout | Features::kSoftcap;
inline constexpr Features every = Features::kEvery;
}  // namespace table

/// Returns "sm80_bf16_d128_v128_m128_n64_s3_w4", followed by the features, as in "_dropout_sinks".
std::string name_of(const Variant& variant);

}  // namespace flashtile
