// This scheduler takes the blocks of rows of a few ragged sequences, about longest first, without a list in memory.
#pragma once

#include <cstdint>

#include "flashtile/scheduler/parts.h"
#include "flashtile/scheduler/single.h"

namespace flashtile {

/// FewSequences has the order of the parts of at most 32 sequences (see RaggedTiles) in shared memory, so that no
/// kernel has to list them beforehand. The first parts of all come first, that of the sequence with the most keys
/// before the others', then the second ones, and so on. The code is short, as a kernel loads its first key only after
/// this code has been fetched into the instruction cache and has run.
struct FewSequences {
  struct Part {
    std::uint16_t first_place, first_block, blocks, batch;
  };
  Part parts[RaggedOrder::kMostParts * RaggedOrder::kFewSequences];  // in order, those without a block too
  Sequence sequences[RaggedOrder::kFewSequences];

  /// A warp calls it, with a lane for each sequence. Returns how many places there are (see RaggedPart): as in a list,
  /// 0 where tables break the rules.
  __device__ int place(Sequences const& all, RaggedOrder const& order) {
    const int lane = threadIdx.x % 32, entries = all.q.entries();
    bool legal = true;  // as in is_legal(), from the same two entries of a table as the spans
    const auto span_of = [&](Spans const& spans) {
      const int begin = spans.begins[min(lane, spans.batch)], end = spans.begins[min(lane + 1, spans.batch)];
      int used = end - begin;
      if (spans.used != nullptr && lane < spans.batch) used = max(min(spans.used[lane], used), 0);
      legal &= (lane > 0 || begin == 0) & (begin <= end) & (end <= spans.size);
      return Span{begin, (lane == entries - 1 ? spans.size : end) - begin, used};
    };
    const Sequence own{span_of(all.q), span_of(all.k)};
    sequences[lane] = own;
    const int blocks_of_own = blocks_of(own, order);
    Counts counts = 0;
#pragma unroll 1  // registers are scarce, here and below
    for (int part = 0; part < order.parts; ++part) {
      const Range blocks = blocks_of_part(blocks_of_own, part, order.parts, true);
      counts |= Counts(blocks.end - blocks.begin) << part * 16;
    }
    const int rank = min(own.k.used, kMostKeys) << 5 | (31 - lane);  // unique, as it holds the lane
    Counts first_places = 0;
    int before = 0;  // sequences of a higher rank
#pragma unroll 2
    for (int other = 0; other < entries; ++other) {
      const int rank_of_other = __shfl_sync(kWarp, rank, other);
      const Counts counts_of_other = __shfl_sync(kWarp, counts, other);
      if (rank_of_other > rank) {
        first_places += counts_of_other;
        ++before;
      }
    }
    const unsigned last = __ballot_sync(kWarp, lane < entries && before == entries - 1);
    const Counts sum = __shfl_sync(kWarp, first_places + counts, __ffs(last) - 1);
    first_places += sum * kBefore;
#pragma unroll 1
    for (int part = 0; part < order.parts && lane < entries; ++part) {
      const Range blocks = blocks_of_part(blocks_of_own, part, order.parts, true);
      parts[part * entries + before] = {std::uint16_t(first_places >> part * 16), std::uint16_t(blocks.begin),
                                        std::uint16_t(blocks.end - blocks.begin), std::uint16_t(lane)};
    }
    __syncwarp();
    return __all_sync(kWarp, legal) ? int((sum * kBefore + sum) >> 48) : 0;
  }

  /// A thread calls it for the tile `index`, which must exist, in part `at` or a later one. Sets `at` to that part.
  __device__ TileCoord find(unsigned index, RaggedOrder const& order, int& at) const {
    const int place = order.heads.quotient(int(index));
    while (place >= parts[at].first_place + parts[at].blocks) ++at;
    const Part part = parts[at];
    // The divisions of heads_at_once() are spared where heads come one by one.
    const int at_once =
        order.blocks_of_section == 0 ? 1 : heads_at_once(order, blocks_of(sequences[part.batch], order));
    TileCoord tile{.batch = part.batch};
    RaggedPart{part.first_place, part.batch, part.first_block, part.blocks, at_once}.find(
        index, order.heads.value, true, tile.head, tile.m_block);
    return tile;
  }

 private:
  __device__ static int blocks_of(Sequence const& sequence, RaggedOrder const& order) {
    return order.rows.quotient(sequence.q.size + order.rows.value - 1);
  }

  // Counts are four of 16 bits, one for each part: multiplied with kBefore, each becomes the sum of those before it.
  using Counts = std::uint64_t;
  static constexpr Counts kBefore = 0x0001'0001'0001'0000;
  static_assert(RaggedOrder::kMostParts == 4 && RaggedOrder::kFewPlaces < 1 << 16);
  static constexpr int kMostKeys = (1 << 26) - 1;  // more keys rank as so many
  static constexpr unsigned kWarp = 0xffffffff;
};

}  // namespace flashtile
