// A count that several thread blocks share, in memory that nobody clears before.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

#include "flashtile/macros.h"
#ifdef __CUDACC__
#include <cuda/atomic>
#endif

namespace flashtile {

/// Memory holds kLimit · mark + the count. No other run has this mark, so whoever comes sees whether someone has begun.
/// Who counts last clears it, for a captured graph, whose runs share a mark.
struct MarkedCount {
  static constexpr std::uint64_t kLimit = 1 << 20;  // beyond any count

  std::uint64_t* place = nullptr;
  std::uint64_t mark = 0;

  FLASHTILE_HOST_DEVICE bool given() const { return place != nullptr; }

  /// A mark that no other run has: numbers from a random one on.
  static std::uint64_t new_mark() {
    static std::atomic<std::uint64_t> next = [] {
      std::random_device random;
      return std::uint64_t{random()} << 32 | random();
    }();
    return next++ % (~std::uint64_t{0} / kLimit) + 1;
  }

#ifdef __CUDACC__
  /// What memory holds: asked for early, as the trip takes long.
  __device__ std::uint64_t found() const { return *static_cast<volatile std::uint64_t*>(place); }

  /// Before a thread first adds: the count begins with 0, whatever was `found`.
  __device__ void begin(std::uint64_t found) const {
    const std::uint64_t none = mark * kLimit;
    if (found - none >= kLimit) atomicCAS(address(), found, none);
  }

  /// The count before this one.
  __device__ int add(cuda::memory_order order) const {
    return int(cuda::atomic_ref<unsigned long long, cuda::thread_scope_device>(*address()).fetch_add(1, order) %
               kLimit);
  }

  /// By the thread that has added last.
  __device__ void clear() const { *place = 0; }

 private:
  __device__ unsigned long long* address() const { return reinterpret_cast<unsigned long long*>(place); }
#endif
};

}  // namespace flashtile
