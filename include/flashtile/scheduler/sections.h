// This file orders the blocks of several heads section by section.
#pragma once

#include "flashtile/macros.h"
#include "flashtile/range.h"

namespace flashtile {

/// Returns the ranks of the `part`-th of the parts of some blocks, whose ranks go from the most work to the least: two
/// thirds, the first half of the rest, and so on.
FLASHTILE_HOST_DEVICE Range ranks_of_part(int blocks, int part, int parts) {
  const auto left = [&](int taken) { return taken == 0 ? blocks : taken == parts ? 0 : blocks / 3 >> (taken - 1); };
  return {blocks - left(part), blocks - left(part + 1)};
}

/// A section is `heads_at_once` heads, few enough for what they share to stay in the L2 cache; the last section may
/// have fewer. Their blocks are interleaved: first comes the block of rank 0 of each head, then that of rank 1, and so
/// on.
struct BlockOfSection {
  int section;
  int head;
  int rank;

  /// Returns the block `index` of `heads` heads of `blocks` blocks each.
  FLASHTILE_HOST_DEVICE static BlockOfSection at(unsigned index, int heads, int blocks, int heads_at_once) {
    const unsigned of_section = unsigned(heads_at_once) * unsigned(blocks);
    const unsigned section = index / of_section;
    const int within = int(index - section * of_section);
    const int first = int(section) * heads_at_once;
    const int here = heads - first < heads_at_once ? heads - first : heads_at_once;
    const int rank = here == 1 ? within : int(unsigned(within) / unsigned(here));
    return {int(section), first + within - rank * here, rank};
  }

  /// Returns the same where sections come several times, each time with a part of their ranks. So the blocks of the
  /// last ranks, which have little work, come at the end for all heads. With one part a long block of the last section
  /// would outlast all others.
  FLASHTILE_HOST_DEVICE static BlockOfSection in_parts(unsigned index, int heads, int blocks, int heads_at_once) {
    Range ranks = ranks_of_part(blocks, 0, kParts);
    const auto blocks_of_heads = [&] { return unsigned(heads) * unsigned(ranks.end - ranks.begin); };
    FLASHTILE_NO_UNROLL
    for (int part = 1; part < kParts && index >= blocks_of_heads(); ++part) {
      index -= blocks_of_heads();
      ranks = ranks_of_part(blocks, part, kParts);
    }
    BlockOfSection found = at(index, heads, ranks.end - ranks.begin, heads_at_once);
    found.rank += ranks.begin;
    return found;
  }

 private:
  static constexpr int kParts = 4;
};

}  // namespace flashtile
