#include "flashtile/join_gradients.h"

#include <cute/config.hpp>

#include "flashtile/cuda/constants.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/math/element.h"
#include "flashtile/math/round.h"

namespace flashtile {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;     // floats of a 16-byte load
constexpr int kTogether = 4;   // loads that a thread has in flight
constexpr int kMostTeams = 8;  // of threads that share the parts

struct JoinParams {
  BackwardParams backward;
  int tile_n;              // keys of the backward kernel's tiles
  int teams;               // the threads of a thread block that have the same vector each sum some of the parts
  Divisor vectors_of_row;  // of dK and, behind them, of dV, as far as these are wanted
  Divisor slices;          // thread blocks for one block of keys
};

__device__ void add(float4& sum, float4 const& x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

/// Sums the parts from `part` on, `stride` apart, in this order. `first` is part 0's, and parts are `pitch` floats
/// apart.
__device__ float4 sum_of_parts(const float* first, std::int64_t pitch, int part, int parts, int stride) {
  float4 sum = {};
#pragma unroll 1
  for (; part < parts; part += kTogether * stride) {
    float4 x[kTogether] = {};
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i)
      if (part + i * stride < parts)
        x[i] = __ldcs(reinterpret_cast<const float4*>(first + (part + i * stride) * pitch));
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) add(sum, x[i]);
  }
  return sum;
}

/// Has a few thread blocks for each block of keys, which divide its rows and columns among them: a thread, or one of
/// each team, has four neighbouring columns of a row of dK or dV. The order of the sums is the same in every run.
template <class Element>
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ JoinParams join) {
  let_next_kernel_start();
  if (threadIdx.x / 32 == 0) prefetch_constants(join);
  BackwardParams const& params = join.backward;
  if (params.ragged_keys.given()) await_kernel_before();  // the list of tiles is of a kernel before
  const int index = join.slices.quotient(blockIdx.x), slice = join.slices.remainder(blockIdx.x);
  BackwardParams::KeyTile tile;
  const bool there = params.find_key_tile(index, tile);
  await_kernel_before();
  if (!there) return;

  const int of_team = kThreads / join.teams, team = threadIdx.x / of_team;
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
    __shared__ float4 sums[kThreads];
    sums[threadIdx.x] = sum;
    __syncthreads();  // the sums of all teams are there
    if (team > 0) return;
    for (int i = 1; i < join.teams; ++i) add(sum, sums[i * of_team + threadIdx.x]);
  }
  if (!exists) return;
  Strides const& strides = is_dk ? params.dk_strides : params.dv_strides;
  const float scale = is_dk ? params.scale : params.dropout.scale;
  Element* const to = static_cast<Element*>(is_dk ? params.dk : params.dv) + strides.at(tile.batch, keys.first + key) +
                      tile.kv_head * strides.head + column;
  *reinterpret_cast<uint2*>(to) = {round_pair<Element>(scale * sum.x, scale * sum.y),
                                   round_pair<Element>(scale * sum.z, scale * sum.w)};
}

}  // namespace

void join_gradients(BackwardPlan const& plan, BackwardParams const& params, Stream stream) {
  static KernelHandles f16, bf16;
  const int columns = (params.dk ? params.head_dim : 0) + (params.dv ? params.head_dim_v : 0);
  if (plan.parts == 1 || columns == 0) return;
  const Variant& v = plan.variant;
  // With few parts, a thread has all of them in flight.
  int teams = 1;
  while (teams < kMostTeams && teams * kTogether < plan.parts) teams *= 2;
  const int vectors = columns / kVector;
  const int slices = (v.tile_n * vectors * teams + kThreads - 1) / kThreads;
  const JoinParams join{.backward = params,
                        .tile_n = v.tile_n,
                        .teams = teams,
                        .vectors_of_row = Divisor(vectors),
                        .slices = Divisor(slices)};
  const int blocks = static_cast<int>(params.workspace.partial_rows / (std::int64_t{plan.parts} * v.tile_n));
  const LaunchShape shape = {blocks * slices, kThreads, 0, v.arch == Arch::kSm90};
  v.dtype == DType::kFloat16
      ? launch(join_kernel<ElementOf<DType::kFloat16>>, f16, plan.problem.device, shape, join, stream)
      : launch(join_kernel<ElementOf<DType::kBFloat16>>, bf16, plan.problem.device, shape, join, stream);
}

}  // namespace flashtile
