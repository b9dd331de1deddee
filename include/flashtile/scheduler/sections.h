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
};

}  // namespace flashtile
