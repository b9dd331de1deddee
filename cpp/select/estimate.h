// This file estimates times, by which select compares rows that are equally wide. Only their ratio has a meaning, and
// only among rows of one table and architecture. A time of 0 says that there is nothing to compare.
#pragma once

#include "flashtile/math/head_packing.h"
#include "flashtile/plan.h"
#include "flashtile/registry.h"

namespace flashtile {

struct Estimate {
  double time = 0;
  HeadPacking packing;  // the packing of heads with which a forward takes this time
};

/// Estimates the time of one head, in keys of a 128-row tile in the steady state.
Estimate estimate(const ForwardRow& row, const Problem& p);

/// Estimates the time of one block of keys, in queries.
Estimate estimate(const BackwardRow& row, const Problem& p);

/// Estimates the time of one KV head's tiles, in tiles of 16 rows.
Estimate estimate(const KvcacheRow& row, const Problem& p);

/// Estimates the time of a forward kernel that goes over a cache. Tiles are few there, and have about equal work where
/// a chunk of queries is short, so this counts a last wave that is only partly filled (the tail effect) as a whole one.
Estimate estimate_prefill(const Variant& v, const Problem& p, const DeviceInfo& device);

}  // namespace flashtile
