// This file says which compiled copy of the kernels runs.
#pragma once

#include "cpu.h"
#include "flashtile/problem.h"
#include "kernels.h"

namespace flashtile::cpu {

/// Returns the kernels of the instruction set in use, or plain AVX-512 ones where dot products of bfloat16 would not
/// give this problem's numbers.
const Kernels& kernels(const Problem& problem);

}  // namespace flashtile::cpu
