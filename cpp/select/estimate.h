// This file estimates times, by which select compares rows that are equally wide. Only their ratio has a meaning, and
// only among rows of one table and architecture. A time of 0 says that there is nothing to compare.
#pragma once

#include "flashtile/math/head_packing.h"
#include "flashtile/plan.h"
#include "flashtile/registry.h"

namespace flashtile {

/// These were counted from the kernels, for any Hopper GPU, and checked on an H100 alone. Times are in nanoseconds.
namespace counted {

inline constexpr double kBytes = 2500;    // that memory moves in a nanosecond
inline constexpr double kFlops = 4000;    // that the matmuls of one multiprocessor do in one
inline constexpr double kClearly = 0.95;  // estimates are no more exact than this share of each other

/// Returns the time of the unit of estimates, a key of a tile of 128 rows.
constexpr double time_of_key(const Variant& v) {
  return 2 * 128 * (v.head_dim + v.head_dim_v) / kFlops;
}

}  // namespace counted

struct Estimate {
  double time = 0;
  HeadPacking packing;  // the packing of heads with which a forward takes this time,
  int splits = 1;       // and among how many thread blocks the keys of a tile are divided
};

/// Returns the packing that leaves fewest tiles, and of several the widest. Packs that share heads compute some twice,
/// so they have to leave fewer tiles than others. Where scores are mapped there are none: whether a block is mapped and
/// weighed in one pass depends on all rows of a warp, and with it a row's last bits, so that two packs which share a
/// head might store different ones. It packs none where int cannot count the rows of so long a sequence, nor where
/// heads have ALiBi slopes, since a tile has one slope, nor of e4m3 numbers, which have descales, nor with dropout,
/// whose random words are indexed by the rows of a head.
HeadPacking packing_of_fewest_tiles(const Variant& v, const Problem& p);

/// Estimates the time of a forward, in keys of a 128-row tile in the steady state.
Estimate estimate_forward(const Variant& v, const Problem& p, const DeviceInfo& device);

/// Does the same with the best number of splits above 1, the kernel that joins their results included. A time of 0 says
/// that no number is of use.
Estimate estimate_splits(const Variant& v, const Problem& p, const DeviceInfo& device);

/// Does the same for a batch-invariant call over a cache, whose splits are whole numbers of fixed parts, perhaps all.
Estimate estimate_fixed_parts(const Variant& v, const Problem& p, const DeviceInfo& device);

/// Estimates the time of one block of keys, in queries.
Estimate estimate(const BackwardRow& row, const Problem& p);

/// Estimates the time of a call over a cache by Ampere's tiles of so many rows, in keys of a tile of 16 rows.
double time_over_cache(int tile_m, const Problem& p, const DeviceInfo& device);
Estimate estimate(const KvcacheRow& row, const Problem& p, const DeviceInfo& device);

/// Returns how many key blocks a tile over a cache has. A key block is what the groups of warps of a thread block take
/// at a time.
std::int64_t key_blocks(const Variant& v, const Problem& p);

/// Returns how many thread blocks of a kernel over a cache run at a time.
int blocks_at_a_time(const Variant& v, const DeviceInfo& device);

/// Returns how many thread blocks had best share each of so many tiles of few rows over a cache, of all KV heads, which
/// are no more than thread blocks run at a time; 0 if these had best share the keys of all tiles evenly.
int blocks_of_tile(const Variant& v, const Problem& p, std::int64_t tiles, const DeviceInfo& device);

/// Returns whether each of so many tiles over a cache, of all KV heads, has so few keys that it is best taken whole, by
/// one thread block.
bool takes_whole_tiles(const Variant& v, const Problem& p, std::int64_t tiles, const DeviceInfo& device);

/// Returns the time of such a tile of few rows relative to one by four warps, which depends on the whole batch: a
/// thread block that goes from tile to tile joins the results of its warps at the end of each.
double time_of_warps(const Variant& v, const Problem& p, const DeviceInfo& device);

}  // namespace flashtile
