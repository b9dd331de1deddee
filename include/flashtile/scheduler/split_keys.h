// This scheduler says which keys of which tile a thread block goes through, where few rows meet many keys
// (Flash-Decoding, Dao et al. 2023).
#pragma once

#include <bit>
#include <cstdint>

#include "flashtile/cache.h"
#include "flashtile/macros.h"
#include "flashtile/mask/columns.h"
#include "flashtile/mask/mask.h"
#include "flashtile/math/head_packing.h"
#include "flashtile/sequence.h"

namespace flashtile {

/// The keys of each query tile are cut into items, units of work, and the items of all tiles form one line: tile after
/// tile, sequence after sequence. A team is a group of thread blocks, one for each KV head. Teams share the line out
/// evenly, wherever that cuts a tile's keys (Lean Attention, Sanovar et al. 2024). So thread blocks of a team read
/// neighbouring heads of the same rows, and the grid is the same whatever the lengths are: a captured graph serves all.
///
/// An item is kItem keys, unless the caller says how many splits there are, or how long they are, so that results do
/// not depend on what else is in the batch. Splits are items of their own only if they lie `apart`; otherwise all
/// splits of a tile are one item.
struct SplitKeys {
  Spans queries;
  CachedRows rows;
  Mask mask;
  LastColumns masked;
  GroupPacking packing;
  Divisor teams;
  int keys_of_split = 0;  // a multiple of kItem; 0 if the caller gives no length
  int num_splits = 0;     // 0 if the caller gives no number
  bool apart = false;
  int most_queries = Band::kUnbounded;  // sequences of more are left to another kernel

  struct Tile {
    Lengths lengths;
    Range queries;  // those of the tile that count
    Range keys;     // from the first split's or item's beginning to the last visible key
    int split = 1;  // keys of a split, or of an item
    int items = 1;
  };

  template <int kM>
  FLASHTILE_HOST_DEVICE int tiles_of(Span span) const {
    if (span.used > most_queries) return 0;
    return (span.size * packing.heads.value + kM - 1) / kM;
  }

  /// Returns whether rows see the keys that the cache holds up to the diagonal at least, or those of a window that ends
  /// there, none are left out at the beginning as padding, and keys are cut into no splits, or into splits of 2^n keys
  /// that lie apart. So it is where tokens are decoded. Then plain_tile() and plain_walk() are what tile() and walk()
  /// are, in fewer instructions: without a division, and without a branch for each option.
  bool plain() const {
    return rows.skipped == nullptr && mask.band.left >= 0 && mask.band.right >= 0 &&
           (num_splits == 0 ? keys_of_split == 0 || (apart && (keys_of_split & (keys_of_split - 1)) == 0)
                            : num_splits == 1 && keys_of_split == 0);
  }

  /// Returns whether each sequence is one tile of up to `tile_m` rows besides, all of which count, and has as many new
  /// rows as the others. Then whole_tile() has the tile of a sequence that holds so many rows.
  bool has_one_tile_each(int tile_m) const {
    return plain() && !queries.ragged() && queries.used == nullptr && queries.size > 0 &&
           queries.size <= most_queries && queries.size <= tile_m / packing.heads.value && rows.added_begins == nullptr;
  }

  template <int kM, int kItem>
  FLASHTILE_HOST_DEVICE Tile plain_tile(Span span, int keys, int m_block) const {
    const int end = packing.query(m_block * kM + kM - 1) + 1;
    const Range those = {packing.query(m_block * kM), end < span.used ? end : span.used};
    const Lengths lengths = {span.used, keys};
    return plain_items<kItem>(lengths, those, those.empty() ? 0 : mask.columns(those.end - 1, lengths).end);
  }

  template <int kItem>
  FLASHTILE_HOST_DEVICE Tile whole_tile(int held) const {
    const int keys = CachedRows{.batch = 1, .capacity = rows.capacity, .added = rows.added}.at(0, held).end;
    return plain_items<kItem>({queries.size, keys}, {0, queries.size}, keys);
  }

  template <int kM, int kItem>
  FLASHTILE_HOST_DEVICE Tile tile(Span span, CachedRows::Rows counting, int m_block) const {
    Tile tile{
        .lengths = {span.used, counting.end - counting.begin}, .queries = {}, .keys = {}, .split = kItem, .items = 1};
    const int end = packing.query(m_block * kM + kM - 1) + 1;
    tile.queries = {packing.query(m_block * kM), end < span.used ? end : span.used};
    if (tile.queries.empty()) return tile;
    tile.keys = {mask.columns(tile.queries.begin, tile.lengths).begin,
                 mask.columns(tile.queries.end - 1, tile.lengths).end};
    if (tile.keys.empty()) {
      tile.keys = {};
      return tile;
    }
    // Divisions take long and delay the load of the first key, so only splits make them.
    if (!splits()) {
      tile.keys.begin = tile.keys.begin / kItem * kItem;
      tile.items = parts(tile.keys.end - tile.keys.begin, kItem);
      return tile;
    }
    if (keys_of_split > 0) tile.split = keys_of_split;
    tile.keys.begin = tile.keys.begin / tile.split * tile.split;
    const int keys = tile.keys.end - tile.keys.begin;
    if (num_splits > 0) tile.split = parts(parts(keys, num_splits), kItem) * kItem;
    if (apart) tile.items = parts(keys, tile.split);
    return tile;
  }

  /// Returns the walk over `keys`, some of a tile's, in blocks of `width` keys from the first of them on. A block with
  /// a key that the column mask has is an edge block.
  FLASHTILE_HOST_DEVICE BlockWalk walk(Tile const& tile, Range keys, int width) const {
    const Lengths lengths = {tile.lengths.q, tile.lengths.k - keys.begin};
    const Range interior = mask.walk(tile.queries, width, lengths).interior;
    const int count = keys.empty() ? 0 : keys.end - keys.begin, unmasked = masked.first(lengths.k);
    const int whole = (unmasked < count ? unmasked : count) / width;
    return {{0, parts(count, width)}, {interior.begin, interior.end < whole ? interior.end : whole}};
  }

  FLASHTILE_HOST_DEVICE BlockWalk plain_walk(Tile const& tile, Range keys, int width) const {
    const Lengths lengths = {tile.lengths.q, tile.lengths.k - keys.begin};
    const int count = keys.empty() ? 0 : keys.end - keys.begin;
    const int of_first = mask.columns(tile.queries.begin, lengths).end;
    const int last_begin = mask.columns(tile.queries.end - 1, lengths).begin, unmasked = masked.first(lengths.k);
    // All rows see [last_begin, seen), and the column mask has none of these.
    const int seen = of_first < unmasked ? of_first : unmasked;
    return {{0, parts(count, width)}, {parts(last_begin, width), (seen < 0 ? 0 : seen < count ? seen : count) / width}};
  }

  /// Returns whether the caller asked for splits; these are items only if they lie `apart`.
  FLASHTILE_HOST_DEVICE bool splits() const { return keys_of_split > 0 || num_splits > 0; }

  template <int kM, int kItem>
  FLASHTILE_HOST_DEVICE int items_of(int b) const {
    const Span span = queries.at(b);
    const CachedRows::Rows counting = rows.at(b);
    int items = 0;
    for (int m = 0; m < tiles_of<kM>(span); ++m) items += tile<kM, kItem>(span, counting, m).items;
    return items;
  }

  /// Returns whether the begins of ragged queries ascend from `b` to the next. Where they do not, sequences may have
  /// more tiles in all than select has counted: then nothing is computed.
  FLASHTILE_HOST_DEVICE bool sorted(int b) const {
    return !queries.ragged() || queries.begins[b] <= queries.begins[b + 1];
  }

 private:
  /// Returns the tile of rows `those`, of which the last one sees keys up to `end`.
  template <int kItem>
  FLASHTILE_HOST_DEVICE Tile plain_items(Lengths lengths, Range those, int end) const {
    Tile tile{.lengths = lengths, .queries = those, .keys = {}, .split = kItem, .items = 1};
    int begin = 0;
    if (mask.band.left < Band::kUnbounded) begin = mask.columns(those.begin, lengths).begin;
    if (begin >= end) return tile;
    if (keys_of_split > 0) {  // shifts, as a division would take long
      tile.keys = {begin & ~(keys_of_split - 1), end};
      tile.split = keys_of_split;
      tile.items = (tile.keys.end - tile.keys.begin + keys_of_split - 1) >> log2_of(keys_of_split);
      return tile;
    }
    tile.keys = {begin / kItem * kItem, end};
    const int items = parts(tile.keys.end - tile.keys.begin, kItem);
    num_splits > 0 ? tile.split *= items : tile.items = items;
    return tile;
  }

  FLASHTILE_HOST_DEVICE static int log2_of(int power) {
#ifdef __CUDA_ARCH__
    return 31 - __clz(power);
#else
    return std::bit_width(static_cast<unsigned>(power)) - 1;
#endif
  }
  FLASHTILE_HOST_DEVICE static int parts(int keys, int of) { return (keys + of - 1) / of; }
};

/// Teams share out the line of all items as evenly as whole items allow. The shares that are one item longer are spread
/// over the line: where there are a whole number of teams for each tile, and tiles are equally long, each share then
/// ends where its tile does. With fewer items than teams the first teams have one each, so that none between two others
/// has nothing to hand in.
struct TeamShares {
  int items;
  int each;
  std::uint32_t more;  // the rest for a team, in steps of 2^-32 items
  int teams;           // that have items

  FLASHTILE_HOST_DEVICE static TeamShares of(int items, Divisor teams) {
    if (items < teams.value) return {items, 1, 0, items};
    const std::uint64_t rest = unsigned(teams.remainder(items));
    // The quotient is rounded up, so that the last share ends with the last item.
    return {items, teams.quotient(items), std::uint32_t(rest * teams.multiplier >> teams.shift) + 1, teams.value};
  }
  FLASHTILE_HOST_DEVICE int first_item(int team) const {
    const int first = each * team + int(std::uint64_t(more) * unsigned(team) >> 32);
    return first < items ? first : items;
  }
  FLASHTILE_HOST_DEVICE int team_of(int item) const {
#ifdef __CUDA_ARCH__
    const float teams_per_item = __fdividef(float(teams), float(items));  // a division that rounds calls a function
#else
    const float teams_per_item = float(teams) / float(items);
#endif
    int team = int(float(item) * teams_per_item);  // rounded: perhaps a neighbour of the right one
    while (first_item(team) > item) --team;
    while (first_item(team + 1) <= item) ++team;
    return team;
  }
};

}  // namespace flashtile
