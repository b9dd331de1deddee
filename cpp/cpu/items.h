// What the threads of a call take one after the other: one block of rows, of one head, of one batch entry.
#pragma once

#include <cstdint>
#include <functional>

#include "flashtile/problem.h"

namespace flashtile::cpu {

/// Where the entries of a batch lie. A ragged one has at least one entry here: of no sequences, all rows are unused
/// rows of an empty one. `tensors` may be null as long as only places are asked for.
Sequences entries_of(const Problem& problem, const ForwardTensors* tensors);

struct Item {
  Sequence rows;
  int batch;
  int head;    // of those that the loop is over
  int block;   // of `blocks`
  int blocks;  // that this head of the entry has
};

/// The items of one parallel loop. Those of a ragged batch are sorted by how much there is to see, so that a long one
/// does not come last; those of a dense batch need no table, as each of its entries has as many.
class Items {
 public:
  struct Entry {
    std::int64_t first;  // of its items
    std::int64_t cost;   // of each of its items
    int batch;
    int blocks;
  };
  static std::int64_t table_size(const Problem& problem);

  /// `blocks` says how many an entry has for each of `heads` heads; `table` has room for table_size(problem).
  Items(const Problem& problem, const Sequences& sequences, Entry* table, int heads,
        const std::function<int(const Sequence&)>& blocks);

  std::int64_t count() const { return count_; }
  Item at(std::int64_t index) const;

  /// How much longer than an even share of the work the thread with most of it takes, about.
  double stretch(int threads) const;

 private:
  Sequences sequences_;
  Entry* table_;
  int entries_ = 0;
  int heads_;
  int blocks_ = 0;  // of each entry of a dense batch
  std::int64_t count_ = 0;
};

}  // namespace flashtile::cpu
