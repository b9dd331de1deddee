"""What eager calls and the operators of torch.library have in common: the compiled core, and who asks for it."""

import torch
from torch import Tensor

from . import _C

is_compiling = torch.compiler.is_dynamo_compiling
under_functorch = torch._C._are_functorch_transforms_active
_CONTIGUOUS = torch.contiguous_format
DTYPES = {"cpu": (torch.float32, torch.float16, torch.bfloat16), "cuda": (torch.float16, torch.bfloat16)}


def gradients(needed, dout, dlse, q, k, v, out, rows, options):
    """[dq, dk, dv, dsinks], None where not `needed`; `dout` or `dlse` may be None. `rows` is what the forward
    left of its softmax, or an lse, whose one float32 does not say enough where scores are large."""
    dout = torch.zeros_like(out) if dout is None else _dense(dout)
    if dlse is not None:
        dlse = dlse.contiguous()
    alibi_slopes, sinks, *scalars, deterministic, sequences = options
    found = [
        torch.empty_like(x, memory_format=_CONTIGUOUS) if wanted else None
        for x, wanted in zip((q, k, v, sinks), needed, strict=True)
    ]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = (alibi_slopes, sinks, *scalars, deterministic, sequences)
    _C.backward(dout, dlse, q, k, v, out, rows, *found, options)
    return found


def as_float32(sinks):
    """Few numbers, which models keep in their own dtype; autograd casts the gradient back."""
    return sinks.float() if isinstance(sinks, Tensor) and sinks.is_floating_point() else sinks


def aligned(x):
    """`x`, or a contiguous copy if its address or a stride is no multiple of 16 bytes."""
    size = x.element_size()
    if x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone(memory_format=_CONTIGUOUS)


def _dense(x):
    """`x` as a kernel can read it: autograd expands gradients of sums with stride 0, and slices those of parts."""
    if x.stride(-1) != 1:
        return x.contiguous()
    return aligned(x) if x.is_cuda else x
