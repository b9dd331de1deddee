// MarkedCount is a count that several thread blocks share, in memory that nobody clears beforehand.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

#include "flashtile/macros.h"
#ifdef __CUDACC__
#include <cuda/atomic>
#endif

namespace flashtile {

/// Memory holds kLimit · mark + the count, where the mark is a number that no other run has. So a thread block sees
/// whether another one of its run has begun to count. The one that counts last clears the memory, for the sake of
/// captured graphs, whose runs share a mark.
struct MarkedCount {
  static constexpr std::uint64_t kLimit = 1 << 20;  // beyond any count

  std::uint64_t* place = nullptr;
  std::uint64_t mark = 0;

  FLASHTILE_HOST_DEVICE bool given() const { return place != nullptr; }

  /// Returns a mark that no other run has: marks are numbers from a random one on.
  static std::uint64_t new_mark() {
    static std::atomic<std::uint64_t> next = [] {
      std::random_device random;
      return std::uint64_t{random()} << 32 | random();
    }();
    return next++ % (~std::uint64_t{0} / kLimit) + 1;
  }

#ifdef __CUDACC__
  /// Returns what memory holds. Callers ask early, as the load takes long.
  __device__ std::uint64_t found() const { return *static_cast<volatile std::uint64_t*>(place); }

  /// A thread calls it before it first adds: it makes the count begin at 0, whatever memory held (`found`).
  __device__ void begin(std::uint64_t found) const {
    const std::uint64_t none = mark * kLimit;
    if (found - none >= kLimit) atomicCAS(address(), found, none);
  }

  /// Adds 1 and returns the count before that.
  __device__ int add(cuda::memory_order order) const {
    return int(cuda::atomic_ref<unsigned long long, cuda::thread_scope_device>(*address()).fetch_add(1, order) %
               kLimit);
  }

  /// The thread that has added last calls it.
  __device__ void clear() const { *place = 0; }

 private:
  __device__ unsigned long long* address() const { return reinterpret_cast<unsigned long long*>(place); }
#endif
};

}  // namespace flashtile
