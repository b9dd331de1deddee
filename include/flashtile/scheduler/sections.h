// This file orders the blocks of several heads section by section.
#pragma once

#include "flashtile/macros.h"

namespace flashtile {

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

  /// Returns the same where sections come several times, each time with a part of their ranks: two thirds, a half of
  /// the rest, and so on. So the blocks of the last ranks, which have little work, come at the end for all heads. With
  /// one part a long block of the last section would outlast all others.
  FLASHTILE_HOST_DEVICE static BlockOfSection in_parts(unsigned index, int heads, int blocks, int heads_at_once) {
    int first = 0, end = blocks - blocks / 3;
    FLASHTILE_NO_UNROLL
    for (int part = 1; part < kParts && index >= unsigned(heads) * unsigned(end - first); ++part) {
      index -= unsigned(heads) * unsigned(end - first);
      first = end;
      end = part + 1 < kParts ? blocks - (blocks / 3 >> part) : blocks;
    }
    BlockOfSection found = at(index, heads, end - first, heads_at_once);
    found.rank += first;
    return found;
  }

 private:
  static constexpr int kParts = 4;
};

}  // namespace flashtile
