// As many thread blocks as multiprocessors, each taking tile after tile.
#pragma once

#include "flashtile/macros.h"
#include "flashtile/plan.h"
#include "flashtile/scheduler/single.h"

namespace flashtile {

/// Which tile a thread block takes in which round, fixed beforehand: no counter that someone would have to reset.
///
/// Tiles stand section by section. A section is `heads_at_once` heads side by side, few enough for their keys and
/// values to stay in the L2 cache: first the last block of query rows of each, then the last but one, and so on; under
/// a causal mask that is from the most work to the least. Every other section runs the other way, so that neighbours
/// have about equal work there too, and the last one ends with the least. Rounds alternate in direction as well: who
/// got the longest tile of one gets the shortest of the next.
struct PersistentScheduler {
  int heads = 1;  // or packs of heads
  int m_blocks = 1;
  int batch_heads = 1;  // batch · heads
  int heads_at_once = 1;

  static PersistentScheduler of(const ForwardPlan& plan) {
    const int packs = plan.problem.heads_q / plan.packing.heads();
    return {packs, plan.m_blocks, plan.problem.batch * packs, plan.heads_at_once};
  }

  // Unsigned, because the last round may reach past the largest int.
  FLASHTILE_HOST_DEVICE unsigned tiles() const { return unsigned(batch_heads) * unsigned(m_blocks); }
  FLASHTILE_HOST_DEVICE unsigned rounds(unsigned blocks) const { return (tiles() + blocks - 1) / blocks; }

  /// Its place among all tiles; none if that is not below tiles(), which happens in the last round alone.
  FLASHTILE_HOST_DEVICE unsigned index(unsigned round, unsigned block, unsigned blocks) const {
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  }

  FLASHTILE_HOST_DEVICE TileCoord tile(unsigned index) const {
    const unsigned tiles_of_section = unsigned(heads_at_once) * unsigned(m_blocks);
    const int section = int(index / tiles_of_section);
    const int within = int(index - section * tiles_of_section);
    const int first = section * heads_at_once;
    const int here = batch_heads - first < heads_at_once ? batch_heads - first : heads_at_once;
    const int level = within / here;
    const int batch_head = first + within - level * here;
    const int batch = batch_head / heads;
    const int sections_after = (batch_heads + heads_at_once - 1) / heads_at_once - 1 - section;
    return {batch, batch_head - batch * heads, sections_after % 2 == 0 ? m_blocks - 1 - level : level};
  }
};

}  // namespace flashtile
