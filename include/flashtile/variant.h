// The compile-time choices of one kernel. A kernel takes one of these as its only template parameter; the rows stand
// in cpp/variants/*.def.
#pragma once

#include <string>

#include "flashtile/tensor_view.h"

namespace flashtile {

enum class Arch : std::uint8_t { kCpu, kSm80 };

struct Variant {
  Arch arch;
  DType dtype;
  int head_dim;  // the largest D and D_v that it serves
  int tile_m;    // query rows of a tile
  int tile_n;    // keys of a tile
  int stages;    // K (and V) tiles in shared memory at a time
  int warps;

  constexpr int threads() const { return warps * 32; }
  constexpr bool operator==(const Variant&) const = default;
};

constexpr const char* name_of(Arch arch) {
  return arch == Arch::kCpu ? "cpu" : "sm80";
}

/// "sm80_bf16_d128_m128_n64_s2_w4"
std::string name_of(const Variant& variant);

}  // namespace flashtile
