// This file lists the work items that the threads of a call take one after the other: one block of rows, of one head,
// of one batch entry.
#pragma once

#include <cstdint>
#include <functional>

#include "flashtile/problem.h"

namespace flashtile::cpu {

/// Returns where the entries of a batch lie. A ragged batch has at least one entry here: without sequences, all rows
/// are unused rows of an empty one. `tensors` may be null as long as only slots (see Spans::places) are asked for.
Sequences entries_of(const Problem& problem, const ForwardTensors* tensors);

struct Item {
  Sequence rows;
  int batch;
  int head;    // index among the heads that the loop is over
  int block;   // index among `blocks`
  int blocks;  // count of blocks of this head of the entry
};

/// These are the work items of one parallel loop. Those of a ragged batch are sorted by how many elements are visible,
/// so that a long one does not come last; a dense batch needs no table, as all of its entries have equally many items.
class Items {
 public:
  struct Entry {
    std::int64_t first;  // index of the entry's first item
    std::int64_t cost;   // cost of each of its items
    int batch;
    int blocks;
  };
  static std::int64_t table_size(const Problem& problem);

  /// `blocks` returns how many blocks an entry has for each of `heads` heads; `table` has room for table_size(problem).
  Items(const Problem& problem, const Sequences& sequences, Entry* table, int heads,
        const std::function<int(const Sequence&)>& blocks);

  std::int64_t count() const { return count_; }
  Item at(std::int64_t index) const;

  /// Returns about how many times an even share of the work the busiest thread takes.
  double stretch(int threads) const;

 private:
  Sequences sequences_;
  Entry* table_;
  int entries_ = 0;
  int heads_;
  int blocks_ = 0;  // blocks of each entry of a dense batch
  std::int64_t count_ = 0;
};

}  // namespace flashtile::cpu
