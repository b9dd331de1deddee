#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace flashtile::cpu {

void parallel_for(int threads, std::int64_t count, const std::function<void(int thread, std::int64_t item)>& work) {
  std::atomic<std::int64_t> next{0};
  const auto take_items = [&](int thread) {
    for (std::int64_t item = next++; item < count; item = next++) work(thread, item);
  };
  std::vector<std::jthread> helpers;
  const int helper_count = static_cast<int>(std::min<std::int64_t>(threads, count)) - 1;
  try {
    for (int i = 0; i < helper_count; ++i) helpers.emplace_back(take_items, i + 1);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that run take all items.
  }
  take_items(0);
}

}  // namespace flashtile::cpu
