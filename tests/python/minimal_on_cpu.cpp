// Runs minimal.cu on a CPU: the threads of a block are threads here, and __syncthreads() is a barrier of theirs.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __shared__ static  // of one block: blocks run one after the other

namespace {

constexpr int kThreads = 32;

struct Index {
  int x;
};
thread_local Index threadIdx, blockIdx;
std::barrier<> barrier(kThreads);

void __syncthreads() {
  barrier.arrive_and_wait();
}

using std::min;

}  // namespace

#include "minimal.cu"

namespace {

template <class... T, std::size_t... I>
void run(void (*kernel)(T...), int blocks, void** arguments, std::index_sequence<I...>) {
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([=] {
      threadIdx.x = t;
      for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        kernel(*static_cast<T*>(arguments[I])...);
        __syncthreads();
      }
    });
}

template <class... T>
void run(void (*kernel)(T...), int blocks, void** arguments) {
  run(kernel, blocks, arguments, std::index_sequence_for<T...>());
}

}  // namespace

/// The arguments as cuLaunchKernel takes them.
extern "C" void launch_flash1(int blocks, void** arguments) {
  run(flash1, blocks, arguments);
}
