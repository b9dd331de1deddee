// Which compiled copy of the kernels runs.
#pragma once

#include "cpu.h"
#include "kernels.h"

namespace flashtile::cpu {

/// The kernels of the instruction set in use.
const Kernels& kernels(DType dtype);

}  // namespace flashtile::cpu
