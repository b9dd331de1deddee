"""What eager calls and the operators of torch.library have in common: the compiled core, and who asks for it."""

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from . import _C
from ._invariance import is_batch_invariant
from ._options import BATCH_INVARIANT, DETERMINISTIC, SINKS, TENSORS, replaced

is_compiling = torch.compiler.is_dynamo_compiling
under_functorch = torch._C._are_functorch_transforms_active
_CONTIGUOUS = torch.contiguous_format
_no_dispatch = Tensor.__torch_dispatch__
DTYPES = {"cpu": (torch.float32, torch.float16, torch.bfloat16), "cuda": (torch.float16, torch.bfloat16)}
_MOST_DIMENSIONS = 4  # of tensors that the module takes
WIDEST = 256  # head dimension of Q and K, and of V


_FLAT = {  # what takes the parts of a jagged nested tensor
    "attention": "attention_varlen of values(), with offsets().int() as cu_seqlens_q and cu_seqlens_k",
    "attention_varlen": "values(), with offsets().int() as cu_seqlens_q and cu_seqlens_k",
    "attention_cascade": "values() as q, with offsets().int() as cu_seqlens_q",
    "attention_kvcache": "values() as q, with offsets().int() as cu_seqlens_q",
    "combine": "values()",
    "max_logits": "values(), with offsets().int() as cu_seqlens_q and cu_seqlens_k",
    "dequantize": "values(), with offsets().int() as cu_seqlens",
    "quantize": "values(), with offsets().int() as cu_seqlens_q and cu_seqlens_k",
}


def forward_with_state(q, k, v, options):
    """(out, lse, state): `state` is what `gradients` wants of the softmax, on CUDA lse where batch_invariant is.
    Who has not asked the mode, as `_autograd.attend` does, has no bits that would fit it."""
    if options[BATCH_INVARIANT] is None and is_batch_invariant():
        raise NotImplementedError(
            "attention: batch_invariant_mode is on, expected a call on one device, not a part of one on several, nor a "
            "graph that was traced elsewhere; nearest supported: batch_invariant_mode(False)"
        )
    try:
        return _C.forward_with_state(q, k, v, options)
    except _C.Unreadable:
        return _C.forward_with_state(readable(q), readable(k), readable(v), readable_options(options))


def gradients(needed, dout, dlse, q, k, v, out, state, options):
    """[dq, dk, dv, dsinks], None where not `needed`; `dout` or `dlse` may be None. `state` is what the forward
    left of its softmax, or an lse, whose one float32 does not say enough where scores are large."""
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:  # autograd expands gradients of sums with stride 0
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    found = [
        torch.empty_like(x, memory_format=_CONTIGUOUS) if wanted else None
        for x, wanted in zip((q, k, v, options[SINKS]), needed, strict=True)
    ]
    if options[DETERMINISTIC] is None:
        options = replaced(options, DETERMINISTIC, torch.are_deterministic_algorithms_enabled())
    operands = (dout, dlse, q, k, v, out, state)
    try:
        _C.backward(*operands, *found, options)
    except _C.Unreadable:
        _C.backward(*map(readable, operands), *found, readable_options(options))
    return found


def takes_operators(*tensors):
    """Whether there is a transform of torch.func, or a class among theirs that takes operators itself, as fake tensors
    do outside of their mode."""
    return under_functorch() or any(
        getattr(type(x), "__torch_dispatch__", _no_dispatch) is not _no_dispatch for x in tensors
    )


def recorded(name, *operands):
    """The scope in which a profiler that is active sees an operator of this name."""
    return _RecordFunctionFast(f"flashtile::{name}", [x for x in operands if isinstance(x, Tensor)])


def as_float32(sinks):
    """Few numbers, which models keep in their own dtype; autograd casts the gradient back."""
    return sinks.float() if isinstance(sinks, Tensor) and sinks.is_floating_point() else sinks


def readable(x, written=()):
    """`x`, or a contiguous copy of what no kernel can read as it lies in memory: lazily negated, with gaps in the last
    dimension, on CUDA not at multiples of 16 bytes, or where the caches `written` lie."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return x
    strides, size = x.stride(), x.element_size()
    scattered = strides[-1:] not in ((), (1,)) or x.is_neg()
    misaligned = x.is_cuda and (x.data_ptr() % 16 != 0 or any(stride * size % 16 != 0 for stride in strides[:-1]))
    if scattered or misaligned or any(_meet(x, cache) for cache in written):
        return x.clone(memory_format=_CONTIGUOUS)
    return x


def readable_options(options):
    """The same with tensors that a kernel can read, among them those of a tuple. What it writes stays where it is."""
    values = (tuple(map(readable, x)) if isinstance(x, tuple) else x for x in options[TENSORS:])
    return (*map(readable, options[:TENSORS]), *values)


def require_tensors(function, **operands):
    """What the module says of operands that an operator cannot take."""
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name} is of type {type(x).__name__}, expected a torch.Tensor")
    refuse_nested(function, **operands)
    for name, x in operands.items():
        if x.layout is not torch.strided:
            raise TypeError(f"{function}: {name} is not a dense strided tensor (its layout is {x.layout})")


def refuse_flag(function, name, flag):
    raise TypeError(f"{function}: {name} is {_C.described(flag)}, expected True or False")


def require_shape(function, name, x, shape):
    if x.shape != shape:
        raise ValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected {tuple(shape)}")


def require_shape_and_dtype(function, name, x, shape, dtype):
    require_shape(function, name, x, shape)
    if x.dtype != dtype:
        raise TypeError(f"{function}: {name} has dtype {x.dtype}, expected {dtype}")


def check_begins(function, name, begins, rows, rows_name):
    """The numbers of cu_seqlens, which are at hand, of so many rows."""
    before = 0
    for i, begin in enumerate(begins.tolist()):
        found = f"{function}: {name} has {begin} at index {i}"
        if i == 0 and begin != 0:
            raise ValueError(f"{found}, expected 0")
        if begin < before:
            raise ValueError(f"{found}, expected at least {before}")
        if begin > rows:
            raise ValueError(f"{found}, expected at most {rows} = {rows_name}")
        before = begin


def entries_of(q, cu_seqlens_q):
    """B. Of what is no tensor it is 0, for the module to say so."""
    return _rows(q) if cu_seqlens_q is None else max(_rows(cu_seqlens_q) - 1, 0)


def _rows(x):
    return x.shape[0] if isinstance(x, Tensor) and x.dim() > 0 else 0


def refuse_gradients_into(function, out, *inputs):
    """Autograd keeps results by itself, and nothing is differentiable that is written over."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (out, *inputs)):
        raise NotImplementedError(
            f"{function}: out is given and a gradient is asked for, expected one of them; nearest supported: "
            "torch.no_grad(), or no out"
        )


def require_place(function, out, shape, dtype, device, read):
    """Refuses an `out` that a result cannot be copied to, or that has elements in tensors that are `read`, by name. The
    module has the same rules for results that kernels write, and knows about memory where there is some."""
    require_tensors(function, out=out)
    require_copyable(function, "out", out, shape, dtype, device)
    if is_compiling():
        return
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(f"{function}: out has stride {out.stride(-1)} in its last dimension, expected 1")
    if has_memory(out, *read.values()):
        _C.check_place(function, out, read)


def require_copyable(function, name, place, shape, dtype, device):
    """Refuses a tensor that a result of this shape, dtype and device cannot be copied to as it is."""
    require_shape_and_dtype(function, name, place, shape, dtype)
    if place.device != device:
        raise ValueError(f"{function}: {name} is on {place.device}, expected {device}")
    require_own_elements(function, name, place, "memory of its own for each row")


def require_own_elements(function, name, place, expected):
    """Refuses a tensor of which two elements are one in memory. Where a call is compiled, sizes and strides may be
    known in no call yet, and a copy gets everywhere."""
    if is_compiling() or (has_memory(place) and place.is_contiguous()):
        return
    for dim, (size, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if isinstance(size, int) and size > 1 and isinstance(stride, int) and stride == 0:  # no symbols of an export
            raise ValueError(f"{function}: {name} has stride 0 in dimension {dim}, expected {expected}")
    if place.dim() <= _MOST_DIMENSIONS and _is_refused(place, place.new_empty(0)):
        raise ValueError(f"{function}: {name} has strides {place.stride()}, expected {expected}")


def has_memory(*tensors):
    """Whether the module can be asked where all of these lie."""
    return not (is_compiling() or takes_operators(*tensors)) and all(x.device.type in DTYPES for x in tensors)


def share_elements(x, y):
    """Whether an element of one is one of the other in memory. Where the module does not look, it counts whether they
    begin at the same one."""
    if x.device != y.device or not has_memory(x, y):
        return False
    refused = _is_refused(x, y)
    return x.data_ptr() == y.data_ptr() if refused is None else refused


def _is_refused(place, read):
    """Whether the module refuses a place of this memory; None of one that no kernel could write to, as on CUDA those
    that are no multiples of 16 bytes."""
    if not has_memory(place, read):
        return None
    try:
        _C.check_place("", place, {"": read})
    except ValueError:
        return True
    except (NotImplementedError, TypeError):
        return None
    return False


def copied_into(out, result):
    """`result` of an operator, which allocates out, or (out, lse): with `out` in its place, where that is given."""
    if out is None:
        return result
    found, *lse = result if isinstance(result, tuple) else (result,)
    out.copy_(found)
    return (out, *lse) if lse else out


def refuse_nested(function, **operands):
    for name, x in operands.items():
        if getattr(x, "is_nested", False):
            raise NotImplementedError(
                f"{function}: {name} is a nested tensor, expected a dense one; nearest supported: {_FLAT[function]}"
            ) from None  # no need to say what else is wrong with it


def _meet(x, y):
    """Whether the stretches of memory meet that reach from the first to the last byte of each."""
    (begin, end), (other_begin, other_end) = map(_stretch, (x, y))
    return begin < other_end and other_begin < end


def _stretch(x):
    begin = x.data_ptr()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + elements * x.element_size()
