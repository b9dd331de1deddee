#include "items.h"

#include <algorithm>

namespace flashtile::cpu {

Sequences entries_of(const Problem& problem, const ForwardTensors* tensors) {
  Sequences sequences = problem.sequences(tensors != nullptr ? *tensors : ForwardTensors{});
  if (problem.ragged && (tensors == nullptr || problem.batch == 0)) {
    static constexpr int kEmpty[2] = {0, 0};
    for (Spans* spans : {&sequences.q, &sequences.k}) {
      *spans = {std::max(problem.batch, 1), spans->size, kEmpty, nullptr};
    }
  }
  return sequences;
}

std::int64_t Items::table_size(const Problem& problem) {
  return problem.ragged ? std::max(problem.batch, 1) : 0;
}

Items::Items(const Problem& problem, const Sequences& sequences, Entry* table, int heads,
             const std::function<int(const Sequence&)>& blocks)
    : sequences_(sequences), table_(table), entries_(sequences.q.batch), heads_(heads) {
  if (!problem.ragged) {
    blocks_ = entries_ > 0 ? blocks(sequences.at(0)) : 0;
    count_ = std::int64_t{entries_} * heads * blocks_;
    return;
  }
  Problem one = problem;
  for (int batch = 0; batch < entries_; ++batch) {
    const Sequence rows = sequences.at(batch);
    one.seqlen_q = rows.q.used;
    one.seqlen_k = rows.k.used;
    const int its_blocks = blocks(rows);
    table[batch] = {0, one.visible_elements() / std::max(its_blocks, 1), batch, its_blocks};
  }
  std::stable_sort(table, table + entries_, [](const Entry& a, const Entry& b) { return a.cost > b.cost; });
  for (Entry* entry = table; entry < table + entries_; ++entry) {
    entry->first = count_;
    count_ += std::int64_t{heads} * entry->blocks;
  }
}

Item Items::at(std::int64_t index) const {
  int batch = 0, blocks = blocks_;
  if (sequences_.q.ragged()) {
    // This is the last entry whose first item is not after the index: the one before the first that begins after it.
    const Entry* const entry =
        std::upper_bound(table_, table_ + entries_, index, [](std::int64_t i, const Entry& e) { return i < e.first; }) -
        1;
    index -= entry->first;
    batch = entry->batch;
    blocks = entry->blocks;
  } else {
    batch = static_cast<int>(index / blocks / heads_);
    index %= std::int64_t{heads_} * blocks;
  }
  return {sequences_.at(batch), batch, static_cast<int>(index / blocks), static_cast<int>(index % blocks), blocks};
}

/// Items begin in this order as threads become free, so some thread takes n of the first (n − 1) · threads + 1, each at
/// least as long as the last of them.
double Items::stretch(int threads) const {
  const auto rounds = [&](std::int64_t items) { return static_cast<double>((items + threads - 1) / threads); };
  if (count_ == 0) return 1;
  if (!sequences_.q.ragged()) return rounds(count_) * threads / static_cast<double>(count_);
  double all = 0, longest = 0;
  for (const Entry* entry = table_; entry < table_ + entries_; ++entry) {
    const std::int64_t items = std::int64_t{heads_} * entry->blocks;
    const auto cost = static_cast<double>(entry->cost);
    all += static_cast<double>(items) * cost;
    longest = std::max(longest, rounds(entry->first + items) * cost);
  }
  return all == 0 ? 1 : std::max(longest * threads / all, 1.0);
}

}  // namespace flashtile::cpu
