// This file fetches a cache's page table before it is known which of its pages are wanted.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cache.h"

namespace flashtile {

/// Has the L2 cache fetch the page table of `batch` sequences. One warp of each thread block calls it at once: which
/// pages are wanted shows only when the sequences' lengths have come from memory, and a look-up would wait for memory
/// once more. Each lane fetches one line; of a table with more lines than that, the first ones.
CUTE_DEVICE void prefetch_page_table(Pages const& pages, int batch) {
  constexpr int kEntriesOfLine = 128 / sizeof(int);
  if (pages.table == nullptr) return;
  const std::int64_t entries = (batch - 1) * pages.table_stride + pages.of_sequence;
  const std::int64_t first = std::int64_t(blockIdx.x * 32 + threadIdx.x % 32) * kEntriesOfLine;
  if (first < entries) asm volatile("prefetch.global.L2 [%0];" ::"l"(pages.table + first));
}

}  // namespace flashtile
