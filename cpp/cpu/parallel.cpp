#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace flashtile::cpu {
namespace {

/// A function of this type runs `body` on at most `threads` threads, and returns when all are done.
using Team = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

std::atomic<Team> openmp{nullptr};

/// Returns the entry of the OpenMP runtime that is already in the process (PyTorch brings one), or null. Its threads
/// are awake, and between regions they spin: threads of our own would compete with them for the cores.
Team openmp_of_process() {
  static const bool looked_up = [] {
    openmp = reinterpret_cast<Team>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    // A forked child inherits the runtime's state but not its threads, and would wait for them forever.
    pthread_atfork(nullptr, nullptr, [] { openmp = nullptr; });
    return true;
  }();
  return looked_up ? openmp.load() : nullptr;
}

void run_on_new_threads(void (*body)(void*), void* data, unsigned threads, unsigned /*flags*/) {
  std::vector<std::jthread> helpers;
  try {
    for (unsigned i = 1; i < threads; ++i) helpers.emplace_back(body, data);
  } catch (const std::system_error&) {
    // The system gives no more threads, so those that run take all items.
  }
  body(data);
}

}  // namespace

void parallel_for(int threads, std::int64_t count, const std::function<void(int thread, std::int64_t item)>& work) {
  struct Shared {
    const std::function<void(int, std::int64_t)>& work;
    std::int64_t count;
    std::atomic<int> threads{0};
    std::atomic<std::int64_t> next{0};
  } shared{work, count};
  const auto take_items = [](void* data) {
    auto& s = *static_cast<Shared*>(data);
    const int thread = s.threads++;
    for (std::int64_t item = s.next++; item < s.count; item = s.next++) s.work(thread, item);
  };
  const int useful = static_cast<int>(std::min<std::int64_t>(threads, count));
  if (useful <= 1) return take_items(&shared);
  const Team team = openmp_of_process();
  (team ? team : run_on_new_threads)(take_items, &shared, useful, 0);
}

}  // namespace flashtile::cpu
