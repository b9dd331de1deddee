// A backward kernel in which several thread blocks shared each block of keys leaves parts of dK and dV, in float32.
// This file sums and rounds them, in a kernel of its own or in one with other work.
#pragma once

#include <cute/config.hpp>

#include "flashtile/cuda/launch.h"
#include "flashtile/math/round.h"
#include "flashtile/params.h"

namespace flashtile {

inline constexpr int kJoinThreads = 256;

/// GradientJoin says how thread blocks divide the work of the sums: there are a few for each block of keys, which share
/// its rows and columns. A thread, or one of each team, has four neighbouring columns of a row of dK or dV.
struct GradientJoin {
  static constexpr int kVector = 4;     // floats of a 16-byte load
  static constexpr int kTogether = 4;   // loads that a thread has in flight
  static constexpr int kMostTeams = 8;  // of threads that share the parts

  int tile_n;              // keys of the backward kernel's tiles
  int teams;               // the threads of a thread block that have the same vector each sum some of the parts
  Divisor vectors_of_row;  // of dK and, behind them, of dV, as far as these are wanted
  Divisor slices;          // thread blocks for one block of keys
  int grid;                // thread blocks; none where there are no parts

  static GradientJoin of(BackwardPlan const& plan, BackwardParams const& params) {
    const int columns = (params.dk ? params.head_dim : 0) + (params.dv ? params.head_dim_v : 0);
    if (plan.parts == 1 || columns == 0) return {};
    const int tile_n = plan.variant.tile_n;
    // With few parts, a thread has all of them in flight.
    int teams = 1;
    while (teams < kMostTeams && teams * kTogether < plan.parts) teams *= 2;
    const int vectors = columns / kVector;
    const int slices = (tile_n * vectors * teams + kJoinThreads - 1) / kJoinThreads;
    const int blocks = static_cast<int>(params.workspace.partial_rows / (std::int64_t{plan.parts} * tile_n));
    return {tile_n, teams, Divisor(vectors), Divisor(slices), blocks * slices};
  }
};

__device__ inline void add_to(float4& sum, float4 const& x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

/// Sums the parts from `part` on, `stride` apart, in this order. `first` is part 0's, and parts are `pitch` floats
/// apart.
__device__ inline float4 sum_of_parts(const float* first, std::int64_t pitch, int part, int parts, int stride) {
  constexpr int kTogether = GradientJoin::kTogether;
  float4 sum = {};
#pragma unroll 1
  for (; part < parts; part += kTogether * stride) {
    float4 x[kTogether] = {};
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i)
      if (part + i * stride < parts)
        x[i] = __ldcs(reinterpret_cast<const float4*>(first + (part + i * stride) * pitch));
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) add_to(sum, x[i]);
  }
  return sum;
}

/// Writes the part of dK or dV that thread block `block` of join.grid has, of kJoinThreads threads, when the kernel
/// before is done. The order of the sums is the same in every run.
template <class Element>
__device__ __forceinline__ void join_gradients(BackwardParams const& params, GradientJoin const& join, int block) {
  constexpr int kVector = GradientJoin::kVector;
  if (params.ragged_keys.given()) await_kernel_before();  // the list of tiles is of a kernel before
  const int index = join.slices.quotient(block), slice = join.slices.remainder(block);
  BackwardParams::KeyTile tile;
  const bool there = params.find_key_tile(index, tile);
  await_kernel_before();
  if (!there) return;

  const int of_team = kJoinThreads / join.teams, team = threadIdx.x / of_team;
  const int vector = slice * of_team + threadIdx.x % of_team;
  const int row = join.vectors_of_row.quotient(vector);
  const int of_row = kVector * join.vectors_of_row.remainder(vector);
  const bool is_dk = params.dk != nullptr && of_row < params.head_dim;
  const int column = is_dk || params.dk == nullptr ? of_row : of_row - params.head_dim;
  const int columns = is_dk ? params.head_dim : params.head_dim_v;

  const Span keys = tile.sequence.k;
  const int key = tile.n_block * join.tile_n + row;
  const bool exists = row < join.tile_n && key < keys.size;
  float4 sum = {};
  if (exists && key < keys.used) {
    const std::int64_t pitch = std::int64_t(join.tile_n) * columns;
    const float* const first =
        (is_dk ? params.partial_dk : params.partial_dv) + index * params.parts.value * pitch + row * columns + column;
    sum = sum_of_parts(first, pitch, team, params.parts.value, join.teams);
  }
  if (join.teams > 1) {
    __shared__ float4 sums[kJoinThreads];
    sums[threadIdx.x] = sum;
    __syncthreads();  // the sums of all teams are there
    if (team > 0) return;
    for (int i = 1; i < join.teams; ++i) add_to(sum, sums[i * of_team + threadIdx.x]);
  }
  if (!exists) return;
  Strides const& strides = is_dk ? params.dk_strides : params.dv_strides;
  const float scale = is_dk ? params.scale : params.dropout.scale;
  Element* const to = static_cast<Element*>(is_dk ? params.dk : params.dv) + strides.at(tile.batch, keys.first + key) +
                      tile.kv_head * strides.head + column;
  *reinterpret_cast<uint2*>(to) = {round_pair<Element>(scale * sum.x, scale * sum.y),
                                   round_pair<Element>(scale * sum.z, scale * sum.w)};
}

/// Launches a kernel that does so for all of them. With one part it does nothing.
void join_gradients(BackwardPlan const& plan, BackwardParams const& params, Stream stream);

}  // namespace flashtile
