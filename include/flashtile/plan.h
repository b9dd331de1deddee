// This file holds what was decided: which kernel, with which tile, grid and memory, and why. cpp/select is the only
// place that makes these decisions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "flashtile/math/head_packing.h"
#include "flashtile/problem.h"
#include "flashtile/scheduler/persistent.h"
#include "flashtile/variant.h"

namespace flashtile {

/// This is what select knows of a device.
struct DeviceInfo {
  Device device;
  std::string name;
  int compute_capability = 0;  // 10 · major + minor; 0 for a CPU
  int multiprocessors = 0;     // 0 for a CPU
  int max_shared_memory = 0;   // bytes of shared memory that one thread block may ask for; 0 for a CPU
  std::int64_t l2_bytes = 0;   // size of the L2 cache; 0 for a CPU
  int threads = 1;             // CPU threads that a call may use
};

struct Plan {
  Problem problem;
  Variant variant;
  int packed_heads = 1;              // query heads of a GQA group that share the rows of a tile (PackGQA)
  std::int64_t tiles = 0;            // work items: batch × heads × blocks; with two passes, of both passes
  int grid = 0;                      // thread blocks, or CPU threads
  int shared_memory = 0;             // bytes per thread block
  std::int64_t workspace_bytes = 0;  // memory that the caller provides, 64-byte aligned, contents undefined
  std::int64_t mask_tables_at = 0;   // where MaskTables lie in the workspace
  bool doubles_warps = false;        // thread blocks have twice the variant's warps (see Variant::may_double_warps)
  const char* why = "";              // the rule that chose the variant

  int threads() const { return variant.threads() << int(doubles_warps); }  // of a thread block
};

struct ForwardPlan;
struct BackwardPlan;

/// Runs what the plan says. It is asynchronous on CUDA, never allocates device memory and never synchronises.
using ForwardKernel = void (*)(const ForwardPlan&, const ForwardTensors&, void* workspace, Stream);
using BackwardKernel = void (*)(const BackwardPlan&, const BackwardTensors&, void* workspace, Stream);

struct ForwardPlan : Plan {
  HeadPacking packing;        // of the rows of a tile
  int m_blocks = 0;           // tiles of rows in one head, or one pack of heads
  bool lists = false;         // of a ragged batch, as the next two: whether a kernel that runs before lists the tiles
  int parts_of_sequence = 1;  // see RaggedOrder
  int blocks_of_section = 0;
  std::shared_ptr<const PersistentScheduler> scheduler;  // of Hopper's persistent kernel; else null
  // Among so many thread blocks the keys of each tile are divided, where tiles are too few to fill the GPU. A second
  // kernel joins the partial results, which lie at parts_at in the workspace.
  int splits = 1;
  std::int64_t parts_at = 0;
  ForwardKernel run = nullptr;  // null: this build holds no such kernel (the plan is for another device)
};
struct BackwardPlan : Plan {
  int heads_at_once = 1;      // KV heads whose key blocks are interleaved: see KeyBlock
  int parts_of_sequence = 1;  // of a ragged batch, as the next field: see RaggedOrder
  int blocks_of_section = 0;
  int parts = 1;  // thread blocks that share the queries of a block of keys: see KeyBlock
  // A tile of dQ that more blocks of keys see than these is cleared before they add to it. Of others the first block
  // stores (see SumOfDq); with −1 there are no others.
  int most_that_store = -1;
  BackwardKernel run = nullptr;
};

/// This counts the FLOPs of the matmuls over visible elements, and the fewest bytes that memory must move. They are
/// doubles because those of a legal problem may exceed 64 bits.
struct Cost {
  double flops = 0;
  double bytes = 0;
};
Cost forward_cost(const Problem& problem);
Cost backward_cost(const Problem& problem);

/// Returns several lines for people: problem, variant, tile, grid, memory, FLOPs, bytes, and whether arithmetic or
/// memory bounds a well-made kernel.
std::string to_string(const ForwardPlan& plan);
std::string to_string(const BackwardPlan& plan);

}  // namespace flashtile
