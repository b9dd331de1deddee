// This file hands work items to threads: those of the OpenMP runtime in the process, else new ones that live for one
// call.
#pragma once

#include <cstdint>
#include <functional>

namespace flashtile::cpu {

/// Calls work(thread, item) once for each item of [0, count), in that order as threads become free; `thread` is in
/// [0, threads). `work` must not throw.
void parallel_for(int threads, std::int64_t count, const std::function<void(int thread, std::int64_t item)>& work);

}  // namespace flashtile::cpu
