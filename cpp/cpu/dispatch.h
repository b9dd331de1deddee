// Which compiled copy of the kernels runs.
#pragma once

#include "cpu.h"
#include "flashtile/problem.h"
#include "kernels.h"

namespace flashtile::cpu {

/// The kernels of the instruction set in use that give this problem's numbers.
const Kernels& kernels(const Problem& problem);

}  // namespace flashtile::cpu
