// This file sets the largest logits of a call to what they are before any kernel has raised them.
#pragma once

#include "flashtile/tensor_view.h"
#include "flashtile/variant.h"

namespace flashtile {

/// Sets max_logits, (B, H_q), contiguous, which may be none, to −inf, unless the launch that writes `out` does so: with
/// a variant of Hopper that knows largest logits, that is done just before the kernel, which starts beside it.
void clear_max_logits(const Variant& variant, const TensorView& out, const TensorView& max_logits, Stream stream);

}  // namespace flashtile
