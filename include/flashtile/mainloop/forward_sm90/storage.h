// All roles of Hopper's forward kernel know this: the launch's parameters, tiles and matmuls, and shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "flashtile/cache.h"
#include "flashtile/cuda/barrier.h"
#include "flashtile/cuda/marked_count.h"
#include "flashtile/descales.h"
#include "flashtile/fixed_parts.h"
#include "flashtile/forward_memory.h"
#include "flashtile/load/tma.h"
#include "flashtile/mainloop/wgmma.h"
#include "flashtile/mask/mask.h"
#include "flashtile/math/element.h"
#include "flashtile/math/online_softmax.h"
#include "flashtile/params.h"
#include "flashtile/scheduler/few_sequences.h"
#include "flashtile/scheduler/persistent.h"
#include "flashtile/scheduler/tile_order.h"
#include "flashtile/variant.h"

namespace flashtile {

struct ForwardParamsSm90 {
  ForwardParams forward;
  // Boxes have 64 rows of Q, or 16 where heads leave rows idle, and N of K and V, over pages perhaps fewer, and of the
  // output as the epilogue stores them.
  CUtensorMap q, k, v, out;
  PersistentScheduler scheduler;
  TileOrder order;  // the same, as kernels read it
  // For a few ragged sequences, these are the tiles asked for so far, after the first of each thread block.
  MarkedCount taken;
};

/// Keys and values are in pages: to TMA all their rows lie one behind the other, perhaps with others between pages, and
/// a box has rows of one page. Where queries are a dense batch, `rows` says which rows of the cache count, and always
/// how many at the beginning do not.
struct PagedForwardParamsSm90 : ForwardParamsSm90 {
  Pages pages;
  CachedRows rows;
  int rows_of_box;     // divides a tile, and a page unless a sequence has one alone; 0: rows are gathered
  int k_rows, v_rows;  // from a page to the next, of K and of V
};

/// Numbers are e4m3, with descales; out is bfloat16, or float16.
struct ScaledForwardParamsSm90 : ForwardParamsSm90 {
  Descales q_descales, k_descales, v_descales;
  bool out_is_half;
};

/// The cache has numbers of 8 bits, which are widened (see KeyWidenerSm90).
struct WidenedForwardParamsSm90 : PagedForwardParamsSm90 {
  CacheDescales k_descales, v_descales;
};

/// This is the column mask of the last keys as a tile asks it: see LastColumns in mask/columns.h.
struct ColumnsOfTile {
  const HiddenRows* columns;  // of the last keys of the sequence,
  int first_key;              // from this one on
};

/// The last keys of each sequence have a column mask, as trees of drafts over a cache do.
template <class Params>
struct LastMasked : Params {
  LastColumns masked;
};

/// A batch-invariant call sums up parts of the keys.
template <class Params>
struct InFixedParts : Params {
  FixedParts parts;
};

/// Keys says what is known of a kernel's keys when it is compiled. Each combination in use has a name of its own: nvcc
/// 13.0 writes host code that does not compile for a kernel whose template argument has none.
enum class Keys : std::uint8_t {
  kInRows = 0,
  kInPages = 1,
  kSplit = 2,   // among the thread blocks of a tile, whose results are partial ones: see ForwardParts
  kMasked = 4,  // a column mask hides some: see MaskWords
  kE4M3 = 8,    // they have 8 bits in memory, and queries 16: see KeyWidenerSm90
  kE5M2 = 16,
  kFixedParts = 32,  // the call is batch-invariant: see FixedParts
  kLastMasked = 64,  // a column mask hides some of the last ones: see LastColumns
  kFixedPartsSplit = kFixedParts | kSplit,
  kInFixedPartsOfPages = kFixedParts | kInPages,
  kFixedPartsOfPagesSplit = kInFixedPartsOfPages | kSplit,
  kInPagesSplit = kInPages | kSplit,
  kLastMaskedOfPages = kLastMasked | kInPages,
  kLastMaskedOfPagesSplit = kLastMaskedOfPages | kSplit,
  kE4M3InPages = kInPages | kE4M3,
  kE4M3InPagesSplit = kE4M3InPages | kSplit,
  kE5M2InPages = kInPages | kE5M2,
  kE5M2InPagesSplit = kE5M2InPages | kSplit,
};
constexpr Keys operator|(Keys a, Keys b) {
  return static_cast<Keys>(static_cast<int>(a) | static_cast<int>(b));
}
constexpr bool are(Keys keys, Keys some) {
  return (keys | some) == keys;
}

/// Maps says whether a kernel maps scores, by softcap or ALiBi (see ScoreMap): never, always, or as the call asks. Code
/// that is jumped over takes registers, and time when a kernel begins, so most calls take a kernel without it.
enum class Maps : std::uint8_t { kNever, kAlways, kAsAsked };

template <Variant kV, Keys kKeys = Keys::kInRows, Maps kMaps = Maps::kNever>
struct ForwardMainloopSm90 {
  static constexpr bool kOverPages = are(kKeys, Keys::kInPages);
  static constexpr bool kSplits = are(kKeys, Keys::kSplit);
  static constexpr bool kMasked = are(kKeys, Keys::kMasked);
  static constexpr bool kWidens = are(kKeys, Keys::kE4M3) || are(kKeys, Keys::kE5M2);
  static constexpr bool kScaled = kV.fp8();
  static constexpr bool kFixedParts = are(kKeys, Keys::kFixedParts);
  static constexpr bool kLastMasked = are(kKeys, Keys::kLastMasked);
  static_assert(kOverPages || !kWidens);
  static_assert(!kLastMasked || !(kMasked || kWidens || kFixedParts));
  using UsualParams =
      std::conditional_t<kScaled, ScaledForwardParamsSm90,
                         std::conditional_t<kWidens, WidenedForwardParamsSm90,
                                            std::conditional_t<kOverPages, PagedForwardParamsSm90, ForwardParamsSm90>>>;
  using Params = std::conditional_t<kFixedParts, InFixedParts<UsualParams>,
                                    std::conditional_t<kLastMasked, LastMasked<UsualParams>, UsualParams>>;
  static constexpr int kM = kV.tile_m;
  static constexpr int kN = kV.tile_n;
  static constexpr int kHeadDim = kV.head_dim;
  static constexpr Features kFeatures = kV.features;
  static constexpr bool kKnowsDropout = kV.knows(Features::kDropout);
  static constexpr bool kFindsLargest = kV.knows(Features::kMaxLogits) && !kScaled;
  // Where keys are split, each thread keeps the largest scores of its rows: there blocks are few, of which most would
  // be looked at, and memory takes longer than comparisons. Elsewhere thread blocks exchange them, by a warp of its own
  // or, over pages, where each warp has other work, by that which loads V: see LargestLogits.
  static constexpr bool kKeepsLargest = kFindsLargest && kSplits;
  static constexpr bool kExchangesLargest = kFindsLargest && !kKeepsLargest;
  static constexpr bool kHasExchange = kExchangesLargest && !kOverPages;
  static_assert(!kFindsLargest || !(kWidens || kFixedParts));
  static constexpr int kHeadDimV = kV.head_dim_v;
  static constexpr int kWarpgroups = kM / 64;  // consumer warpgroups
  static constexpr int kBlocksOfPart = keys_of_part(kV) / kN;
  static constexpr int kTransposers = kScaled ? 2 : 0;  // warps that transpose V
  static constexpr int kWideners = kWidens ? 4 : 0;     // warps that widen K and V: a warpgroup
  // There is a producer of Q, and one of K and V: together in rows, apart in pages. Beside transposers one does all.
  static constexpr int kProducers = kScaled ? 1 + kTransposers : kOverPages ? 3 + kWideners : 2;
  static constexpr FixedPartsMemory kMemory =
      kFixedParts ? FixedPartsMemory::of(kV) : FixedPartsMemory{ForwardMemorySm90::of(kV, kWidens)};
  static constexpr bool kSumsInSharedMemory = kMemory.bytes_of_sums > 0;
  static constexpr int kStagesQ = kMemory.stages_q;
  static constexpr int kStages = kMemory.stages_k;              // tiles of K
  static constexpr int kStagesV = kMemory.stages_v;             // as many, unless they are transposed ones,
  static constexpr int kStagesOfRows = kMemory.stages_of_rows;  // which are made of these, as widened ones are
  // A second block of more than 128 columns does not fit beside the barriers.
  static constexpr int kColumnStages = kMasked && kN <= 128 ? kMemory.stages_of_columns : 1;
  static_assert(kV.warps == 4 * (kWarpgroups + 1) + kWideners && kM % 64 == 0 && kN % 16 == 0 && kHeadDim % 32 == 0 &&
                kHeadDimV % 32 == 0);

  using Element = ElementOf<kV.dtype>;
  static constexpr DType kStored =  // of K and V in memory
      !kWidens                  ? kV.dtype
      : are(kKeys, Keys::kE4M3) ? DType::kE4M3
                                : DType::kE5M2;
  using Stored = ElementOf<kStored>;
  // Weights and V. One instruction makes two numbers of 8 bits float16, four make them bfloat16.
  using Weight = std::conditional_t<kWidens, cutlass::half_t, Element>;
  using ShapeQK = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kHeadDim>>;
  // Beside wideners a launch has 128 registers a thread, too few for one matmul of 256 columns.
  static constexpr int kColumnsOfMatmul = kWidens ? cute::min(kHeadDimV, 128) : kHeadDimV;
  using ShapePV = cute::Shape<cute::Int<kM>, cute::Int<kColumnsOfMatmul>, cute::Int<kN>>;
  using Warpgroups = cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>;

  // Where registers allow, matmuls take Q from them: that spares a fifth of the reads of shared memory, and power, too.
  static constexpr int kRegisters =  // of a consumer thread; over pages producers need some of them
      kWarpgroups == 3        ? 160
      : kWidens               ? 208
      : kScaled || kOverPages ? 232
                              : 240;
  static constexpr int kOfWord = 4 / sizeof(Element);
  static constexpr int kRegistersOfTiles =  // O, Q, S, P
      kHeadDimV / 2 + kHeadDim / 2 / kOfWord + kN / 2 + kN / 2 / kOfWord;
  static constexpr bool kKeepQ = kRegistersOfTiles <= kRegisters * 5 / 6;
  static constexpr auto op_qk() {
    using namespace cute::SM90;
    if constexpr (kKeepQ)
      return GMMA::rs_op_selector<Element, Element, float, ShapeQK>();
    else
      return GMMA::ss_op_selector<Element, Element, float, ShapeQK>();
  }
  using MmaQK = decltype(cute::make_tiled_mma(op_qk(), Warpgroups{}));
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<Weight, Weight, float, ShapePV, cute::SM90::GMMA::Major::K,
                                       kScaled ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN>(),
      Warpgroups{}));

  static constexpr int kColumns = columns_per_box(kHeadDim, sizeof(Element));
  static constexpr int kColumnsV = columns_per_box(kHeadDimV, sizeof(Element));
  static constexpr int kColumnsOfStoredK = columns_per_box(kHeadDim, sizeof(Stored));
  static constexpr int kColumnsOfStoredV = columns_per_box(kHeadDimV, sizeof(Stored));
  using SmemLayoutQ = SmemTile<Element, kM, kHeadDim, kStagesQ>;
  using SmemLayoutK = SmemTile<Element, kN, kHeadDim, kStages>;
  // This is V as the matmul sees it, (head_dim, N): the same memory, or, of 8 bits, a transposed tile (see
  // ValueTransposerSm90).
  using SmemLayoutVt = std::conditional_t<kScaled, SmemTile<Element, kHeadDimV, kScaled ? kN : 64, kStagesV>,
                                          SmemTileT<Weight, kN, kHeadDimV, kStagesV>>;

  // Blocks that need no mask have loops of their own: plain ones where registers allow one more copy of the step.
  static constexpr bool kPeelsPlain = kMaps != Maps::kAlways && kHeadDimV < 192;
  static constexpr bool kMapsInOne = kMaps == Maps::kAlways;
  static constexpr bool kStretchesInOne = kHeadDimV < 192;  // P·V takes long beyond that: scores are mapped meanwhile
  // Where scores are mapped, and in short calls, whose keys are split, all other blocks go through one copy of the
  // code. While P·V of wide heads goes on, which takes long, a second copy forms mapped scores.
  // With fixed parts it serves the beginning of a part, too.
  static constexpr bool kOneCopy = kMaps == Maps::kAlways || kSplits || kFixedParts;
  static constexpr bool kFormsMeanwhile = (kMapsInOne && kHeadDimV >= 192) || (kFixedParts && !kSplits);
  /// Returns whether scores are mapped.
  CUTE_DEVICE static bool maps(ScoreMap const& map) {
    return kMaps == Maps::kAlways || (kMaps == Maps::kAsAsked && map.maps());
  }

  using OutElement = std::conditional_t<kScaled, cutlass::bfloat16_t, Element>;  // or float16, which has as many bits
  static constexpr int kColumnsO = columns_per_box(kHeadDimV);
  static constexpr int kRowsOfWarp = 16;  // rows of the output that a warp stages
  using SmemLayoutO = decltype(cute::tile_to_shape(typename SwizzledAtoms<OutElement, kColumnsO>::K{},
                                                   cute::Shape<cute::Int<kRowsOfWarp>, cute::Int<kHeadDimV>>{}));
  static constexpr int kStagingWarps = kMemory.staged ? kM / kRowsOfWarp : 1;
  static constexpr int kStagingPerWarp = kSumsInSharedMemory ? 2 * kRowsOfWarp * kHeadDimV
                                         : kMemory.staged    ? kRowsOfWarp * kHeadDimV
                                                             : 8;  // next to nothing where unused

  /// Work is what the scheduler tells of a tile, whose head is the first one of a pack (see HeadPacking). With
  /// keys.blocks = 0 its rows see nothing; below 0 no tile is left.
  struct Work {
    TileCoord tile;
    int kv_head;
    float slope;  // of ALiBi: consumers would wait for memory with each block of keys
    Sequence sequence;
    TmaRows q_rows, k_rows;
    VisibleKeys<kN> keys;
    struct Nothing {};
    [[no_unique_address]] std::conditional_t<kSplits, std::int64_t, Nothing> part;  // this split's place
    struct ByColumns {
      const std::uint32_t* words;  // the blocks of keys that the tile visits, one in each step (see MaskWords)
      const HiddenRows* columns;   // of the first key of the sequence
    };
    struct ByDescales {
      float q_descales[kWarpgroups];
      const float *k_descales, *v_descales;  // of the head
    };
    /// A descale of keys is the product of two factors: one of scores, which are multiplied anyway, and one of the
    /// numbers, which is 1 unless scores are mapped or must not be multiplied with the descale. Likewise one of values.
    struct ByFactors {
      float of_scores, of_output, of_k, of_v;
    };
    struct Plain {};
    using OfKeys = std::conditional_t<
        kScaled, ByDescales,
        std::conditional_t<
            kWidens, ByFactors,
            std::conditional_t<kMasked, ByColumns, std::conditional_t<kLastMasked, ColumnsOfTile, Plain>>>>;
    /// These are the largest scores so far of the heads of the tile (see LargestLogits), as in_order() has them.
    struct WithLargest : OfKeys {
      int largest[HeadPacking::kRows];
      bool has_one_head;  // and no idle row
    };
    // There is no further member that may be empty: behind several of them nvcc 13.0 laid out code for the GPU
    // otherwise than sizeof and offsetof say.
    [[no_unique_address]] std::conditional_t<kFindsLargest, WithLargest, OfKeys> more;
  };
  /// These are the descales of the rows of a block, of which kRowsOfDescale share one.
  static constexpr int kRowsOfDescale = kN % 64 == 0 ? 64 : 32, kDescales = kN / kRowsOfDescale;
  struct BlockDescales {
    float k[kDescales], v_log2[kDescales];
  };
  static_assert(!kScaled || kN % kRowsOfDescale == 0);
  // A tile stays in use until the next one has begun. A tile of ragged sequences is handed out when so many key blocks
  // of the one before are left to load, and not earlier, as no other thread block can take it then.
  static constexpr int kWorks = kMasked && kFindsLargest ? 3 : 4;  // where a fourth has no room beside the columns
  static constexpr int kBlocksAhead = kStages + 3;

  struct Tiles {
    alignas(1024) Element q[kStagesQ][kM * kHeadDim];
    alignas(1024) Element k[kStages][kN * kHeadDim];
    alignas(1024) Weight v[kStagesV][kN * kHeadDimV];
  };
  /// Of 8 bits V comes to `rows_of_v`, and warps transpose it into `v`.
  struct ScaledTiles : Tiles {
    alignas(1024) Element rows_of_v[kStagesOfRows][kN * kHeadDimV];
  };
  /// Both K and V come as they are stored, and warps widen them into `k` and `v`.
  struct WidenedTiles : Tiles {
    alignas(1024) Stored rows_of_k[kStagesOfRows][kN * kHeadDim];
    alignas(1024) Stored rows_of_v[kStagesOfRows][kN * kHeadDimV];
  };
  struct SharedStorage : std::conditional_t<kScaled, ScaledTiles, std::conditional_t<kWidens, WidenedTiles, Tiles>> {
    alignas(1024) OutElement staging[kStagingWarps][kStagingPerWarp];
    Work work[kWorks];
    struct NoSequences {};
    // This is of 8 bits: the barriers of the rows of V, and the descales of the block whose K is in a stage.
    struct ScaledSequences : FewSequences {
      Ring<kStagesOfRows> barriers;
      BlockDescales descales[kStages];
    };
    /// These are the barriers of the rows of K and V before they are widened.
    struct WidenedSequences : FewSequences {
      Ring<kStagesOfRows> k_barriers, v_barriers;
    };
    [[no_unique_address]] std::conditional_t<
        kMasked, NoSequences,
        std::conditional_t<kScaled, ScaledSequences, std::conditional_t<kWidens, WidenedSequences, FewSequences>>> few;
    // Under a column mask these are the first key of the block whose K is in a stage, and the columns of a block at an
    // edge. All consumers wait for the columns, and the producer for their warps.
    int first_key[kMasked ? kStages : 1];
    HiddenRows columns[kMasked ? kColumnStages : 1][kMasked ? kN : 1];
    Ring<kColumnStages> columns_barriers;
    int ignored[kFindsLargest ? 32 : 1];  // see LargestLogits::tell()
    // Who exchanges the largest scores waits for consumers to have weighed all of a tile: a warp arrives once.
    cutlass::arch::ClusterBarrier weighed[kHasExchange ? kWorks : 1];
    Ring<kWorks> work_barriers;              // producers and all consumers wait for a tile, the scheduler for its slot
    cutlass::arch::ClusterBarrier near_end;  // a ragged scheduler waits for the producer to near a tile's end
    Ring<kStagesQ> q_barriers[kWarpgroups];  // each warpgroup waits for its own rows of Q
    // All consumers wait for tiles, the producer for their warps.
    Ring<kStages> k_barriers;
    Ring<kStagesV> v_barriers;

    /// Some threads call it before Q is loaded, whose idle rows are not (see HeadPacking): NaN among what they hold
    /// would have the weights of each block computed twice.
    CUTE_DEVICE void clear_q(int thread, int threads) {
      for (int i = thread; i < int(sizeof(this->q) / sizeof(uint4)); i += threads)
        reinterpret_cast<uint4*>(this->q)[i] = {};
      cutlass::arch::fence_view_async_shared();  // matmuls and TMA come to it by another way
    }

    /// One thread calls it before any other touches the barriers.
    CUTE_DEVICE void init_barriers() {
      work_barriers.init(128 * kWarpgroups + kProducers + (kHasExchange ? 32 : 0));
      if constexpr (kHasExchange) {
        CUTE_UNROLL
        for (auto& barrier : weighed) barrier.init(4 * kWarpgroups);
      }
      near_end.init(1);
      CUTE_UNROLL
      for (auto& barriers : q_barriers) barriers.init(kKeepQ ? 128 : 4);
      k_barriers.init(4 * kWarpgroups, kWidens ? kWideners : 1);
      v_barriers.init(4 * kWarpgroups, kWidens ? kWideners : kScaled ? kTransposers : 1);
      if constexpr (kScaled) few.barriers.init(kTransposers);
      if constexpr (kWidens) few.k_barriers.init(kWideners), few.v_barriers.init(kWideners);
      if constexpr (kMasked) columns_barriers.init(4 * kWarpgroups);
      cutlass::arch::fence_barrier_init();
    }
  };
  using Softmax = OnlineSoftmax<2, Sharers::kQuad, std::conditional_t<kExchangesLargest, Element, void>>;

  /// Returns where, in a tile, the 16 bytes from `byte` on of a row of a box are: swizzled. A box's rows have kBytes
  /// bytes, 128 or 64.
  template <int kBytes>
  CUTE_DEVICE static int place_in_box(int row, int byte) {
    return row * kBytes + (byte ^ row * kBytes / 128 % (kBytes / 16) * 16);
  }

  /// Returns the first key of the block that is visited in a step.
  CUTE_DEVICE static int key_of_step(Work const& work, int step) { return work.keys.key(work.keys.visited(step)); }
};

}  // namespace flashtile
