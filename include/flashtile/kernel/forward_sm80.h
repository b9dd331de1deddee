// The forward kernel for Ampere and later: one thread block per tile of query rows.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/epilogue/final.h"
#include "flashtile/launch.h"
#include "flashtile/mainloop/forward_sm80.h"
#include "flashtile/order_tiles.h"
#include "flashtile/params.h"

namespace flashtile {

/// `Row` is a type with a `static constexpr Variant kVariant`: nvcc's host stubs cannot spell a class-type template
/// argument of a kernel.
template <class Row>
__global__ void __launch_bounds__(Row::kVariant.threads()) forward_sm80(const __grid_constant__ ForwardParams params) {
  using namespace cute;
  using Mainloop = ForwardMainloopSm80<Row::kVariant>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Mainloop::SharedStorage*>(shared_bytes);
  const int thread = threadIdx.x;
  // Asked anew where it is needed again: registers are few.
  TileCoord tile;
  Sequence sequence;
  const auto find_tile = [&] {
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return params.find_tile(index, tile, sequence);
  };
  if (!find_tile()) return;
  const int first_row = tile.m_block * Mainloop::kM;
  const Range rows = {first_row, min(first_row + Mainloop::kM, sequence.q.used)};
  const VisibleKeys<Mainloop::kN> keys(params.band, rows, sequence.lengths());

  const bool folded = folds(params);
  typename Mainloop::Softmax softmax(folded ? params.score_map.outer_log2 : 1.0f);
  Tensor tOrO = partition_fragment_C(typename Mainloop::TiledMma{},
                                     Shape<Int<Mainloop::kM>, Int<Mainloop::kHeadDim>>{});  // (mma, m, head_dim)
  clear(tOrO);
  if (keys.blocks > 0) Mainloop{params, shared, tile, sequence, keys, thread}.run(tOrO, softmax, folded);
  find_tile();
  FinalEpilogue<Mainloop>::store(params, tile, sequence.q, tOrO, softmax, shared.q, thread);
}

template <class Row>
void launch_forward_sm80(const ForwardPlan& plan, const ForwardTensors& tensors, void* memory, Stream stream) {
  using Storage = typename ForwardMainloopSm80<Row::kVariant>::SharedStorage;
  static_assert(sizeof(Storage) == forward_shared_memory(Row::kVariant));
  static KernelHandles handles;
  const ForwardParams params = ForwardParams::of(plan, tensors, memory);
  if (params.ragged.given())
    order_tiles(params.sequences, {forward_order(plan, params.ragged)}, plan.problem.device, stream);
  launch(forward_sm80<Row>, handles, plan.problem.device, {plan.grid, Row::kVariant.threads(), plan.shared_memory},
         params, stream);
}

}  // namespace flashtile
