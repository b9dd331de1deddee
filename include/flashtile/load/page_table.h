// This file fetches a cache's page table before it is known which of its pages are wanted.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cache.h"

namespace flashtile {

/// Has the L2 cache fetch the page table of `batch` sequences, a line for each lane of one warp of each thread block:
/// which pages are wanted, only the sequences' lengths say, and a look-up would wait for memory after these have come.
/// No call on an H200 was measured to gain by it (docs/performance.md), so it is to go unless another GPU gains.
CUTE_DEVICE void prefetch_page_table(Pages const& pages, int batch) {
  constexpr int kEntriesOfLine = 128 / sizeof(int);
  if (pages.table == nullptr) return;
  const std::int64_t entries = (batch - 1) * pages.table_stride + pages.of_sequence;
  const std::int64_t first = std::int64_t(blockIdx.x * 32 + threadIdx.x % 32) * kEntriesOfLine;
  if (first < entries) asm volatile("prefetch.global.L2 [%0];" ::"l"(pages.table + first));
}

}  // namespace flashtile
