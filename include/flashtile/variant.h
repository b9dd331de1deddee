// The compile-time choices of one kernel. A kernel takes one of these as its only template parameter; the rows stand
// in cpp/variants/*.def.
#pragma once

#include <string>

#include "flashtile/tensor_view.h"

namespace flashtile {

enum class Arch : std::uint8_t { kCpu, kSm80, kSm90 };

struct Variant {
  Arch arch;
  DType dtype;
  int head_dim;  // the largest D and D_v that it serves
  int tile_m;    // query rows of a tile
  int tile_n;    // keys of a tile
  int stages;    // tiles of K and V in shared memory at a time, both together
  int warps;

  constexpr int threads() const { return warps * 32; }
  constexpr bool operator==(const Variant&) const = default;
};

/// Bytes that one thread block may have on Hopper.
inline constexpr int kSharedMemorySm90 = 227 * 1024;

/// Tiles of Q in shared memory: Hopper's kernel has two where they fit.
constexpr int forward_stages_q(const Variant& v) {
  const int with_two = bytes_of(v.dtype) * v.head_dim * (2 * v.tile_m + v.stages * v.tile_n) + 1024;
  return v.arch == Arch::kSm90 && with_two <= kSharedMemorySm90 ? 2 : 1;
}

/// Bytes of shared memory of a CUDA forward kernel: tiles of Q, the ring of K and V tiles, and Hopper's barriers.
constexpr int forward_shared_memory(const Variant& v) {
  const int tiles = bytes_of(v.dtype) * v.head_dim * (forward_stages_q(v) * v.tile_m + v.stages * v.tile_n);
  return tiles + (v.arch == Arch::kSm90 ? 1024 : 0);
}

constexpr const char* name_of(Arch arch) {
  return arch == Arch::kCpu ? "cpu" : arch == Arch::kSm80 ? "sm80" : "sm90";
}

/// The words of the variant tables.
namespace table {
inline constexpr Arch cpu = Arch::kCpu;
inline constexpr Arch sm80 = Arch::kSm80;
inline constexpr Arch sm90 = Arch::kSm90;
inline constexpr DType f32 = DType::kFloat32;
inline constexpr DType f16 = DType::kFloat16;
inline constexpr DType bf16 = DType::kBFloat16;
}  // namespace table

/// "sm80_bf16_d128_m128_n64_s2_w4"
std::string name_of(const Variant& variant);

}  // namespace flashtile
