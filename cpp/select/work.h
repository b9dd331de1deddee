// This file says how much work a problem is: how many tiles it has, whether a GPU can count them, and how many threads
// of a CPU they are worth.
#pragma once

#include <cstdint>

#include "flashtile/plan.h"

namespace flashtile {

inline constexpr const char* kTiles = "tiles (batch × heads × blocks of rows)";

/// Returns `count`, or throws Unsupported where an int does not hold it. A GPU counts its thread blocks in an int, and
/// TMA the rows that it is asked for.
int countable(const char* tensor, std::int64_t count, const char* of_what);

/// Returns the rows that a sequence over a cache has, where all heads of a group are packed.
std::int64_t rows_of_sequence(const Problem& p);

/// Returns how many tiles of rows all sequences have at the most, where `heads` heads are packed.
std::int64_t tiles_of_rows(const Problem& p, const Variant& v, int heads);

/// Returns a plan by whose problem tiles are put in order. What a column mask hides the host does not know: most hide
/// more from the first rows, and so the order is that of a causal mask, in which the longest tiles come first. A band
/// that lies ahead of the diagonal has nothing in common with it, and stays as it is.
template <class Plan>
Plan as_ordered(Plan plan) {
  Problem& p = plan.problem;
  if (p.column_masked() && p.band.left >= 0) p.band = p.band.intersect(Band::causal());
  return plan;
}

/// Returns how many CPU threads `tiles` work items are worth.
int threads_for(std::int64_t tiles, Cost cost, const DeviceInfo& device);

/// Sets work items and threads of a CPU. It packs heads of a group, since keys are read once for all packed heads, but
/// not so many that threads are left without an item. It packs none where int cannot count the rows of so long a
/// sequence, nor where heads have slopes, dropout or a column mask, of which the kernels take one for a tile.
void share_out(Plan& plan, Cost cost, const DeviceInfo& device);

}  // namespace flashtile
