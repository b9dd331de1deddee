// The forward kernel for Ampere and later has one thread block per tile of query rows.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cuda/constants.h"
#include "flashtile/cuda/launch.h"
#include "flashtile/epilogue/final.h"
#include "flashtile/forward_memory.h"
#include "flashtile/mainloop/forward_sm80.h"
#include "flashtile/order_tiles.h"
#include "flashtile/params.h"

namespace flashtile {

/// MaskedScores does what ScoreTile does, with a column mask, too, where `columns` are given, from key 0 on.
struct MaskedScores {
  ScoreTile<HeadPacking> tile;
  const HiddenRows* columns;

  template <Softcaps kSoftcaps, class Scores, class Coord>
  CUTE_DEVICE void map(Scores& scores, Coord const& coord, int first_column) const {
    tile.template map<kSoftcaps>(scores, coord, first_column);
  }
  template <class Scores, class Coord>
  CUTE_DEVICE void mask(Scores& scores, Coord const& coord, int first_column) const {
    tile.mask(scores, coord, first_column);
    if (columns != nullptr)
      hide_by_columns(scores, coord, columns, tile.lengths.k, first_column,
                      [&](int row, HiddenRows const& hidden) { return hidden.hides(tile.first_row + row); });
  }
};

/// ForwardSourceSm80 is the mainloop's Source for the rows of a dense or ragged batch.
template <Variant kV, bool kMayMapScores>
struct ForwardSourceSm80 {
  static constexpr bool kMayMap = kMayMapScores;
  using Params = ForwardParams;
  using Mainloop = ForwardMainloopSm80<kV, ForwardSourceSm80>;

  ForwardParams const& params;
  TileCoord tile;
  Sequence const& sequence;
  VisibleKeys<kV.tile_n> const& keys;
  // Under a column mask these are the blocks that are still to be loaded, and the last one that was. Without one both
  // are not used.
  static constexpr bool kMayMask = kV.may_mask();
  MaskedBlocks ahead{};
  int loaded = 0;

  CUTE_DEVICE bool masked() const { return kMayMask && ahead.words != nullptr; }
  CUTE_DEVICE int visited(int step) const { return masked() ? loaded : step; }

  template <class Shared>
  CUTE_DEVICE void load_q(Shared const& sQ, int thread) const {
    const int row = tile.m_block * kV.tile_m;
    Mainloop::Load::load(tile_of<kV.tile_m>(params.q, params.q_strides, tile.head, sequence.q.first + row), sQ,
                         sequence.q.used - row, params.head_dim, thread);
  }
  template <class Shared>
  CUTE_DEVICE void load_k(int step, Shared const& sK, int thread) {
    if (masked()) loaded = ahead.next(params.mask_tables.queries.words);
    load_keys(params.k, params.k_strides, visited(step), sK, params.head_dim, thread);
  }
  template <class Shared>
  CUTE_DEVICE void load_v(int step, Shared const& sV, int thread) const {
    load_keys(params.v, params.v_strides, visited(step), sV, params.head_dim_v, thread);
  }
  CUTE_DEVICE auto scores(Lengths lengths) const {
    const ScoreTile<HeadPacking> scores{params.scores, tile, tile.m_block * kV.tile_m, lengths};
    if constexpr (kMayMask)
      return MaskedScores{scores, masked() ? params.columns.of_head(tile.batch, tile.head, sequence.k) : nullptr};
    else
      return scores;
  }

 private:
  template <int kRows>
  CUTE_DEVICE auto tile_of(const void* base, Strides const& strides, int head, int row) const {
    return head_tile<kRows, kV.head_dim, typename Mainloop::Element>(base, strides, tile.batch, head, row);
  }
  template <class Shared>
  CUTE_DEVICE void load_keys(const void* base, Strides const& strides, int block, Shared const& shared, int columns,
                             int thread) const {
    constexpr int kN = kV.tile_n;
    Mainloop::Load::load(
        tile_of<kN>(base, strides, params.group.quotient(tile.head), sequence.k.first + keys.key(block)), shared,
        keys.count - block * kN, columns, thread);
  }
};

/// `Row` is a type with a `static constexpr Variant kVariant`: nvcc's host stubs cannot spell a class-type template
/// argument of a kernel. Code that maps scores, even if it is jumped over, takes time where a kernel is soon done: so
/// some exist without it.
template <class Row, bool kMayMap>
__global__ void __launch_bounds__(Row::kVariant.threads()) forward_sm80(const __grid_constant__ ForwardParams params) {
  using namespace cute;
  using Source = ForwardSourceSm80<Row::kVariant, kMayMap>;
  using Mainloop = typename Source::Mainloop;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Mainloop::SharedStorage*>(shared_bytes);
  const int thread = threadIdx.x;
  if (thread < 32) prefetch_constants(params);
  // The tile is found anew for the epilogue, as registers are too scarce to keep it.
  TileCoord tile;
  Sequence sequence;
  const auto find_tile = [&] {
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    if (!params.find_tile(index, tile, sequence)) return false;
    if constexpr (Source::kMayMask) {
      const MaskOrder& order = params.mask_tables.order;
      if (order.at != nullptr) tile.m_block = order.tile(tile.batch, tile.m_block, params.scheduler.m_blocks);
    }
    return true;
  };
  if (!find_tile()) return;
  const int first_row = tile.m_block * Mainloop::kM;
  const Range rows = {first_row, min(first_row + Mainloop::kM, sequence.q.used)};
  int first_key = params.scores.mask.columns(rows.begin, sequence.lengths()).begin;
  if constexpr (Mainloop::kKnowsDropout) first_key = params.dropout.tile_begin(first_key);
  VisibleKeys<Mainloop::kN> keys(params.scores.mask, rows, sequence.lengths(), first_key);
  MaskedBlocks blocks;
  if constexpr (Source::kMayMask) {
    if (params.columns.given()) {
      const MaskWords& words = params.mask_tables.queries;
      blocks.words = words.of_tile(params.sequences.q, tile.batch, sequence.q.first, params.columns.mask_of(tile.head),
                                   tile.m_block);
      keys = {words.steps(blocks.words), sequence.k.used, sequence.lengths()};
    }
  }

  typename Mainloop::Softmax softmax(params.scores.map.unit_log2);
  Tensor tOrO = partition_fragment_C(typename Mainloop::TiledMma{},
                                     Shape<Int<Mainloop::kM>, Int<Mainloop::kHeadDim>>{});  // (mma, m, head_dim)
  clear(tOrO);
  if (keys.blocks > 0)
    Mainloop{params, shared, tile, keys, thread, Source{params, tile, sequence, keys, blocks}}.run(tOrO, softmax);
  find_tile();
  FinalEpilogue<Mainloop>::store(params, tile, sequence.q, tOrO, softmax, shared.q, thread);
}

/// This row is `Row` with twice the warps.
template <class Row>
struct WithDoubledWarps {
  static constexpr Variant kVariant = Row::kVariant.with_doubled_warps();
};

template <class Row>
void launch_forward_sm80(const ForwardPlan& plan, const ForwardTensors& tensors, void* memory, Stream stream) {
  using Storage = typename ForwardSourceSm80<Row::kVariant, true>::Mainloop::SharedStorage;
  static_assert(sizeof(Storage) == forward_shared_memory(Row::kVariant));
  static KernelHandles usual, doubled, doubled_plain;
  const ForwardParams params = ForwardParams::of(plan, tensors, memory);
  const LaunchShape shape{plan.grid, plan.threads(), plan.shared_memory};
  if (plan.problem.column_masked())
    find_mask_tables(params.mask_tables, plan.variant, params.columns, plan.problem, params.sequences, {}, stream);
  if (plan.lists) order_tiles(params.sequences, params.ragged, plan.problem.device, stream);
  if constexpr (Row::kVariant.may_double_warps()) {
    using Doubled = WithDoubledWarps<Row>;
    if (plan.doubles_warps && params.scores.map.maps())
      return launch(forward_sm80<Doubled, true>, doubled, plan.problem.device, shape, params, stream);
    if (plan.doubles_warps)
      return launch(forward_sm80<Doubled, false>, doubled_plain, plan.problem.device, shape, params, stream);
  }
  launch(forward_sm80<Row, true>, usual, plan.problem.device, shape, params, stream);
}

}  // namespace flashtile
