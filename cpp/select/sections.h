// This file chooses sections. A section is a set of heads whose tiles are interleaved on a GPU: tiles of its heads run
// at the same time, those with the most work first, which balances the work. They share the L2 cache, which has no room
// for too many heads. PersistentScheduler, RaggedPart and KeyBlock turn the size of a section into an order of tiles.
#pragma once

#include "flashtile/plan.h"

namespace flashtile {

/// Returns a dense batch of the work of a ragged one in which a few sequences are much longer than the others: half as
/// many, of twice the mean length. Problem::dense() is one whose sequences are equally long.
Problem as_uneven(const Problem& p);

/// Returns the bytes that keys and values of a section should take at most, or the L2 cache does not keep them.
double cached_bytes(const DeviceInfo& device);

/// Returns the bytes of `keys` keys and their values, divided among the query heads, or packs of them, that read them.
double key_bytes_of_head(const ForwardPlan& plan, int keys);

/// Returns the bytes that blocks of keys share in one query head of a dense backward: Q, dO, and the sums of dQ in
/// float32.
double query_bytes_of_head(const Problem& p, const Variant& v);

/// Returns in how many parts a ragged sequence is listed (see RaggedTiles). Under a mask, where the work of its blocks
/// differs, it is divided until the last part is a twelfth, as far as the kernel that lists parts can count them in an
/// int.
int parts_of_sequence(const Problem& p);

/// Returns the same of a backward, whose blocks of keys are listed.
int parts_of_sequence(const Problem& p, const Variant& v);

/// Returns the size of a section of a ragged forward, in blocks of rows (see RaggedOrder): as many heads are
/// interleaved as have their keys and values in the L2 cache together. It is 0, and one head follows the other, under a
/// full mask, where all tiles of a sequence have equal work, and where a thread block takes many tiles: there the parts
/// at the end of the list balance the work, and neighbours read the same keys.
int blocks_of_section(const ForwardPlan& plan, const DeviceInfo& device);

/// Returns the size of a section of a ragged backward, in blocks of keys (see RaggedOrder).
int blocks_of_section(const Problem& p, const Variant& v, const DeviceInfo& device);

/// Returns how many KV heads of a dense backward, of `key_blocks` blocks of keys each, usually make a section.
/// `several` says whether a thread block takes more than one of these blocks. What blocks share of these heads fits the
/// L2 cache, or is of one wave of blocks; on an H100, twice as much was slower (docs/performance.md).
int heads_at_once(const Problem& p, const Variant& v, const DeviceInfo& device, int key_blocks, bool several);

}  // namespace flashtile
