// This scheduler has one thread block per tile: linear block index → (batch, head, block of query rows).
#pragma once

#include "flashtile/macros.h"

namespace flashtile {

struct TileCoord {
  int batch = 0;
  int head = 0;
  int m_block = 0;
};

/// Tiles of one head are neighbours, so that those in flight share K and V in the L2 cache. Within a head the last
/// block comes first (longest first): under a causal mask it has the most work, and the short ones fill the tail.
struct SingleTileScheduler {
  int heads = 1;
  int m_blocks = 1;

  FLASHTILE_HOST_DEVICE TileCoord tile(unsigned index) const {
    const unsigned batch_head = index / unsigned(m_blocks);
    const unsigned from_end = index - batch_head * unsigned(m_blocks);
    const unsigned batch = batch_head / unsigned(heads);
    return {int(batch), int(batch_head - batch * unsigned(heads)), m_blocks - 1 - int(from_end)};
  }
};

}  // namespace flashtile
