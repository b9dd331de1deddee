// This file fetches a kernel's parameters before they are needed.
#pragma once

namespace flashtile {

/// Has the multiprocessor's constant cache fetch the parameters, a line for each lane of the warp that calls it.
/// Otherwise each line is fetched when a role first needs it, and that role waits for memory each time.
template <class Params>
__device__ __forceinline__ void prefetch_constants(Params const& params) {
  constexpr int kLine = 64;
  for (int at = int(threadIdx.x % 32) * kLine; at < int(sizeof(Params)); at += 32 * kLine)
    asm volatile("" ::"r"(*reinterpret_cast<const int*>(reinterpret_cast<const char*>(&params) + at)));
}

}  // namespace flashtile
