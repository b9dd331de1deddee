// This file has the scheduler of Hopper's forward kernel: the warp that says which tile comes next.
#pragma once

#include "flashtile/cuda/launch.h"
#include "flashtile/mainloop/forward_sm90/storage.h"

namespace flashtile {

/// Hands out tiles: those of the plan, or, where sequences are ragged, the next that no thread block has taken. It is a
/// warp, of which one thread does all but order a few sequences.
template <class Mainloop>
struct ForwardSchedulerSm90 {
  using Params = typename Mainloop::Params;
  using SharedStorage = typename Mainloop::SharedStorage;
  using Work = typename Mainloop::Work;
  using Cursor = typename Ring<Mainloop::kWorks>::Cursor;
  static constexpr int kN = Mainloop::kN;

  Params const& params;
  SharedStorage& shared;
  Cursor at{};
  int few_tiles = 0;  // of a few ragged sequences

  /// Hands out what `write(work)` writes, as soon as a slot is free.
  template <class Write>
  CUTE_DEVICE void hand_out(Write&& write) {
    shared.work_barriers.fill(at, [&] {
      write(shared.work[at.stage]);
      return 0;
    });
    at.advance();
  }

  /// Tiles are handed out by an index, where keys are split once for each split: these lie side by side.
  CUTE_DEVICE int tile_of(unsigned index) const {
    return Mainloop::kSplits ? splits().quotient(int(index)) : int(index);
  }
  CUTE_DEVICE int split_of(unsigned index) const { return Mainloop::kSplits ? splits().remainder(int(index)) : 0; }
  CUTE_DEVICE Divisor const& splits() const {
    if constexpr (Mainloop::kFixedParts)
      return params.parts.shares;
    else
      return params.forward.parts.splits;
  }

  /// Hands out a tile of a pack of heads, or a split of it, of the sequence whose spans are `span_of(&Sequence::q)` and
  /// `span_of(&Sequence::k)`.
  template <class SpanOf>
  CUTE_DEVICE void hand_out(TileCoord tile, int split, SpanOf&& span_of) {
    hand_out([&](Work& work) { write(work, tile, split, span_of); });
  }

  template <class SpanOf>
  CUTE_DEVICE void write(Work& work, TileCoord tile, int split, SpanOf&& span_of) const {
    ForwardParams const& forward = params.forward;
    const auto forget = [] { asm volatile("" ::: "memory"); };  // registers are scarce: what is needed is read again
    work.tile = {tile.batch, forward.scores.packing.first_head(tile.head), tile.m_block};
    forget();
    work.sequence.q = span_of(&Sequence::q);
    forget();
    work.sequence.k = span_of(&Sequence::k);
    forget();
    const Span &q = work.sequence.q, &k = work.sequence.k;
    work.kv_head = forward.group.quotient(work.tile.head);
    forget();
    work.q_rows = TmaRows::of(forward.sequences.q, work.tile.batch, q, q.used);
    forget();
    if constexpr (Mainloop::kOverPages) {  // where producers look rows up, it says how many come before the first
      work.k_rows = {};
      if (params.rows.skipped != nullptr) work.k_rows.before = params.rows.at(work.tile.batch).begin;
    } else {
      work.k_rows = TmaRows::of(forward.sequences.k, work.tile.batch, k, k.used);
    }
    forget();
    const Range queries = forward.scores.packing.queries(work.tile.m_block * Mainloop::kM, Mainloop::kM, q.used);
    if constexpr (Mainloop::kMasked) {
      const int mask = forward.columns.mask_of(work.tile.head);
      work.more.columns = forward.columns.of_mask(work.tile.batch, mask, k);
      work.more.words =
          forward.mask_tables.queries.of_tile(forward.sequences.q, work.tile.batch, q.first, mask, work.tile.m_block);
      work.keys = {forward.mask_tables.queries.steps(work.more.words), k.used, work.sequence.lengths()};
    } else if constexpr (Mainloop::kOverPages || Mainloop::kFixedParts) {  // so that boxes lie within pages, or parts
      const int first = forward.scores.mask.columns(queries.begin, work.sequence.lengths()).begin / kN * kN;
      work.keys = VisibleKeys<kN>(forward.scores.mask, queries, work.sequence.lengths(), first);
    } else if constexpr (Mainloop::kScaled) {  // so that blocks begin with rows of a descale
      const int first = forward.scores.mask.columns(queries.begin, work.sequence.lengths()).begin;
      work.keys = VisibleKeys<kN>(forward.scores.mask, queries, work.sequence.lengths(),
                                  first / Mainloop::kRowsOfDescale * Mainloop::kRowsOfDescale);
    } else if constexpr (Mainloop::kKnowsDropout) {
      const int first = forward.scores.mask.columns(queries.begin, work.sequence.lengths()).begin;
      work.keys =
          VisibleKeys<kN>(forward.scores.mask, queries, work.sequence.lengths(), forward.dropout.tile_begin(first));
    } else {
      work.keys = VisibleKeys<kN>(forward.scores.mask, queries, work.sequence.lengths());
    }
    if constexpr (Mainloop::kLastMasked) {
      LastColumns const& masked = params.masked;
      const int mask = masked.ranges.mask_of(work.tile.head), first = masked.first(k.used);
      static_cast<ColumnsOfTile&>(work.more) = {masked.of_mask(work.tile.batch, mask, k.used), first};
      // Blocks are at an edge from that on which has the first key with a column: so many whole ones come before it.
      const int unmasked = max(first - work.keys.first, 0) / kN;
      work.keys.interior.end = min(work.keys.interior.end, max(unmasked, work.keys.interior.begin));
      forget();
    }
    if constexpr (Mainloop::kSplits) {
      forget();
      if constexpr (Mainloop::kFixedParts)
        params.parts.take(split, work.keys);
      else
        work.keys.keep_part(split, forward.parts.splits.value);
      forget();
      work.part = forward.parts.place(forward.sequences.q, tile, q) + (Mainloop::kFixedParts ? 0 : split);
    }
    if constexpr (Mainloop::kFindsLargest) {
      for (int& largest : work.more.largest) largest = in_order(-kInfinity);
      work.more.has_one_head = forward.scores.packing.heads == 1 && (work.tile.m_block + 1) * Mainloop::kM <= q.used;
    }
    // ALiBi makes scores grow towards the diagonal. From there on, few blocks outgrow the reference of the first one.
    // Under a causal mask all rows see the first row's diagonal.
    if (!Mainloop::kMasked && !Mainloop::kFixedParts && forward.scores.slopes.data != nullptr)
      work.keys.begin_at_diagonal(queries.begin);
    forget();
    if constexpr (Mainloop::kScaled) {
      work.more.k_descales = params.k_descales.of_head(work.tile.batch, work.kv_head);
      work.more.v_descales = params.v_descales.of_head(work.tile.batch, work.kv_head);
      const float* const of_q = params.q_descales.of_head(work.tile.batch, work.tile.head);
      CUTE_UNROLL
      for (int w = 0; w < Mainloop::kWarpgroups; ++w) {
        const int row = work.tile.m_block * Mainloop::kM + w * (Mainloop::kM / Mainloop::kWarpgroups);
        work.more.q_descales[w] = usable_descale(params.q_descales.at(of_q, max(min(row, q.used - 1), 0)));
      }
    }
    if constexpr (Mainloop::kWidens) {
      const auto find = [&](CacheDescales const& descales, auto&& suits, float& of_sums, float& of_numbers) {
        const float descale = descales.of(work.tile.batch, work.kv_head, Pages::Place{});
        of_sums = suits(descale) ? descale : 1;
        of_numbers = suits(descale) ? 1 : descale;
      };
      const bool maps = Mainloop::maps(forward.scores.map);
      // Scores may be −inf, and the largest of a row has to stay so.
      const auto suits_scores = [&](float x) { return !maps && x >= 0x1p-60f && x <= 0x1p60f; };
      const auto suits_output = [](float x) { return fabsf(x) >= 0x1p-126f && fabsf(x) <= 0x1p126f; };
      find(params.k_descales, suits_scores, work.more.of_scores, work.more.of_k);
      find(params.v_descales, suits_output, work.more.of_output, work.more.of_v);
    }
    work.slope = forward.scores.slopes.at(work.tile.batch, work.tile.head);  // last, as it comes from memory
  }

  /// Hands out tiles one by one, from the thread block's own on. `find(index, tile)` says whether there is one, of the
  /// sequence with the spans `span_of(tile, side)`; `begin()` follows the first; `take()` says how many were taken.
  template <class Find, class SpanOf, class Begin, class Take>
  CUTE_DEVICE void hand_out_ragged(Find&& find, SpanOf&& span_of, Begin&& begin, Take&& take) {
    unsigned index = blockIdx.x, parity = 0;
    TileCoord tile;
    CUTE_NO_UNROLL
    while (find(index, tile)) {
      Work const& work = shared.work[at.stage];
      hand_out(tile, split_of(index), [&](auto side) { return span_of(tile, side); });
      if (index == blockIdx.x) begin();
      if (work.keys.blocks > 0) {
        shared.near_end.wait(parity);  // waits until the producer is near this tile's end
        parity ^= 1;
      }
      unsigned blocks;
      asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));  // otherwise the compiler keeps it in a scarce register
      index = blocks + unsigned(take());
    }
  }

  CUTE_DEVICE void hand_out_listed() {
    RaggedOrder const& order = params.forward.ragged;
    RaggedTile found;
    hand_out_ragged(
        [&](unsigned index, TileCoord& tile) {
          if (!order.tiles.find(unsigned(tile_of(index)), order.heads.value, true, found)) return false;
          tile = {found.entry->batch, found.head, found.block};
          return true;
        },
        [&](TileCoord, auto side) { return found.entry->sequence.*side; }, [] {},
        [&] { return atomicAdd(order.tiles.taken, 1); });
  }

  CUTE_DEVICE void hand_out_few() {
    int part = 0;
    hand_out_ragged(
        [&](unsigned index, TileCoord& tile) {
          if (index >= unsigned(few_tiles)) return false;
          tile = shared.few.find(unsigned(tile_of(index)), params.forward.ragged, part);
          return true;
        },
        [&](TileCoord tile, auto side) { return shared.few.sequences[tile.batch].*side; },
        [&] { params.taken.begin(params.taken.found()); },
        [&] {
          const int taken = params.taken.add(cuda::memory_order_relaxed);
          // The last one: each block that had a tile asks once in vain.
          if (taken == few_tiles - 1) params.taken.clear();
          return taken;
        });
  }

  /// Hands out the tiles of a dense batch under a column mask, which differ in work as only the GPU knows.
  CUTE_DEVICE void hand_out_masked() {
    const unsigned tiles = params.scheduler.tiles();
    const MaskOrder order = params.forward.mask_tables.order;
    const bool in_parts = tiles > 0 && order.in_parts();
    const Sequence whole = whole_sequence();
    hand_out_ragged(
        [&](unsigned index, TileCoord& tile) {
          if (index >= tiles) return false;
          tile = in_parts ? params.scheduler.tile_in_parts(index) : params.order.tile(index);
          tile.m_block = order.tile(tile.batch, tile.m_block, params.scheduler.m_blocks);
          return true;
        },
        [&](TileCoord, auto side) { return whole.*side; }, [&] { params.taken.begin(params.taken.found()); },
        [&] {
          const int taken = params.taken.add(cuda::memory_order_relaxed);
          if (taken == int(tiles) - 1) params.taken.clear();  // the last one, as in hand_out_few()
          return taken;
        });
  }

  /// Returns where the rows of each entry of a dense batch lie.
  CUTE_DEVICE Sequence whole_sequence() const {
    const int size_q = params.forward.sequences.q.size, size_k = params.forward.sequences.k.size;
    return {{0, size_q, size_q}, {0, size_k, size_k}};
  }

  /// Writes the thread block's n-th tile of a dense batch.
  CUTE_DEVICE void write_dense(Work& work, int n) const {
    Sequence whole = whole_sequence();
    TileCoord tile = params.order.tile(params.scheduler.index(n, blockIdx.x));
    int split = 0;
    if constexpr (Mainloop::kSplits) {  // each split of a block of rows counts as a block
      split = split_of(tile.m_block);
      tile.m_block = tile_of(tile.m_block);
    }
    if constexpr (Mainloop::kOverPages) whole.k.used = params.rows.at(tile.batch).count();
    write(work, tile, split, [&](auto side) { return whole.*side; });
  }

  CUTE_DEVICE void hand_out_dense() {
    CUTE_NO_UNROLL
    for (int n = 1; n < params.scheduler.tiles_of(blockIdx.x); ++n)  // the first was prepared
      hand_out([&](Work& work) { write_dense(work, n); });
  }

  CUTE_DEVICE bool has_dense() const { return params.scheduler.tiles_of(blockIdx.x) > 0; }
  CUTE_DEVICE bool dense() const { return !params.forward.sequences.q.ragged(); }
  CUTE_DEVICE static bool leads() { return threadIdx.x % 32 == 0; }

  /// The warp calls it before the barriers of shared memory can be used, while another thread initialises them: all
  /// other roles wait for the first tile, so that of a dense batch is written then.
  CUTE_DEVICE void prepare() {
    if (!Mainloop::kMasked && dense() && leads() && has_dense()) write_dense(shared.work[0], 0);
  }

  /// The warp calls it as soon as the barriers can be used. It hands out the tile that was prepared: the warp comes to
  /// run() later, as that code has to be fetched into the instruction cache first.
  CUTE_DEVICE void hand_out_prepared() {
    if (!Mainloop::kMasked && dense() && leads() && has_dense()) hand_out([](Work&) {});
  }

  /// Hands out all other tiles. A kernel for ragged sequences may have started early, so the warp waits for the one
  /// before, and with it all roles do, which wait for their first tile.
  CUTE_DEVICE void run() {
    if (dense()) {
      if constexpr (Mainloop::kMasked) await_kernel_before();
      if (leads()) Mainloop::kMasked ? hand_out_masked() : hand_out_dense();
    } else {
      await_kernel_before();
      if constexpr (Mainloop::kMasked) {
        if (leads()) hand_out_listed();
      } else {
        if (params.taken.given()) {
          few_tiles = shared.few.place(params.forward.sequences, params.forward.ragged) *
                      params.forward.ragged.heads.value * (Mainloop::kSplits ? splits().value : 1);
        }
        if (leads()) params.taken.given() ? hand_out_few() : hand_out_listed();
      }
    }
    if (leads()) hand_out([](Work& end) { end.keys.blocks = -1; });
  }
};

}  // namespace flashtile
