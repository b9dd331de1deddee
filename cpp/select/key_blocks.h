// This file chooses how the thread blocks of a backward take its blocks of keys: how many share one, and in which order
// they go.
#pragma once

#include "flashtile/plan.h"

namespace flashtile {

struct KeyBlockOrder {
  int parts = 1;          // thread blocks that share the queries of a block of keys: see KeyBlock
  int heads_at_once = 1;  // KV heads whose blocks are interleaved: see KeyBlock
  int persistent = 0;     // thread blocks that each take one block of keys after the other; 0: each takes one. Where
                          // under a mask they are not of whole heads, they take the next that no other has taken.
  bool operator==(const KeyBlockOrder&) const = default;
};

/// Chooses for the plan of a backward on a GPU, of which problem, variant and shared memory are set, and whose `tiles`
/// are its blocks of keys. Of a second pass it counts no tile.
///
/// Where blocks of keys are few it deals them to thread blocks as the GPU will, for each order that might pay, and
/// takes the one that ends first. Interleaved heads balance the work under a mask, of which the blocks of one head have
/// less and less, but the more there are, the less of what their blocks share stays in the L2 cache. A block of keys
/// has several parts where blocks are too few for the GPU, or are one round of thread blocks and a little more.
KeyBlockOrder order_key_blocks(const BackwardPlan& plan, const DeviceInfo& device);

/// Does the same for a batch-invariant call, whose sums are the same in any batch: parts have some query heads of the
/// group each, so their number goes by the group alone. A block of keys of many heads would otherwise be the work of
/// one thread block, where few of these blocks leave most of the GPU idle.
KeyBlockOrder order_for_any_batch(const BackwardPlan& plan, const DeviceInfo& device);

inline constexpr const char* kFewQueries = "so few queries that most of Hopper's tiles, or of the GPU, would be idle";

/// Returns whether a backward has so few queries that Ampere's kernel is faster than that of Hopper's row `v`. A tile
/// of Hopper's row of narrow heads would be half empty, and Ampere's tiles are smaller. Of two passes, a tile of dQ is
/// the work of one thread block, which goes through all keys: that takes long where such tiles are few and keys are
/// many, and Ampere's kernel has thread blocks for blocks of keys alone.
///
/// It returns false for ragged batches, whose lengths the host does not know, and where Ampere's kernel was not
/// measured: for sums in order and with dropout.
bool has_few_queries(const Problem& problem, const Variant& v, const DeviceInfo& device);

}  // namespace flashtile
