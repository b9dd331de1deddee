// This file is the tile arithmetic of the CPU backend, compiled once per instruction set: FLASHTILE_CPU_KERNELS names
// the function that hands it out.
#include "backward_tile.h"
#include "forward_tile.h"
#include "narrow.h"
#include "rotate.h"

namespace flashtile::cpu {
namespace {

template <class T, bool kToE4m3 = false>
constexpr Kernels kKernels{.forward_begin = forward_begin<T>,
                           .forward_tile = forward_tile<T, kToE4m3>,
                           .forward_end = forward_end<T>,
                           .rotate = rotate<T>,
                           .widen_row = widen_row<T>,
                           .narrow_row = narrow_row<T>,
                           .descale_of_row = descale_of_row<T>,
                           .load_queries = load_queries<T>,
                           .load_keys = load_keys<T>,
                           .backward_tile = backward_tile<T>,
                           .row_dots = row_dots<T>,
                           .store_rows = store_rows<T>};

}  // namespace

const Kernels& FLASHTILE_CPU_KERNELS(DType dtype) {
  switch (dtype) {
    case DType::kE4M3: return kKernels<float, true>;
    case DType::kFloat16: return kKernels<Half>;
    case DType::kBFloat16: return kKernels<BFloat16>;
    default: return kKernels<float>;
  }
}

}  // namespace flashtile::cpu
