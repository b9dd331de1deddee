// This file declares the CPU backend: attention in tiles, vectorised for the instruction set that it finds, on as many
// threads as the plan's grid says.
#pragma once

#include <cstdint>
#include <span>

#include "flashtile/kvcache.h"
#include "flashtile/merge.h"
#include "flashtile/plan.h"

namespace flashtile::cpu {

void run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace, Stream stream);
void run_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace, Stream stream);
void run_kvcache(const KvcachePlan& plan, const KvcacheTensors& tensors, void* workspace, Stream stream);
void merge(const MergeCall& call, int threads);

/// Returns the memory that a run needs for all its threads, whose number the plan says.
std::int64_t forward_workspace_bytes(const ForwardPlan& plan);
std::int64_t backward_workspace_bytes(const Problem& problem, const Variant& variant, int threads);
std::int64_t kvcache_workspace_bytes(const KvcachePlan& plan);

enum class InstructionSet : std::uint8_t { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

const char* name_of(InstructionSet set);

/// Returns the instruction sets that were compiled and that this processor has, the fastest last. The last one is used
/// unless a test asks for another.
std::span<const InstructionSet> instruction_sets();
InstructionSet instruction_set();
void use_instruction_set(InstructionSet set);

}  // namespace flashtile::cpu
