"""What every attention function has in common: the compiled core, behind autograd where an input asks for it."""

import operator

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import _C

_CONTIGUOUS = torch.contiguous_format
under_functorch = torch._C._are_functorch_transforms_active
_ALIBI_SLOPES, _SINKS, _DROPOUT_P, _SEED = 0, 1, 6, 7  # places in `options`, which _C.pyi lists


def attend(function, q, k, v, options, return_lse):
    """Out, or with `return_lse` (out, lse), of the options as the caller gave them; messages name `function`."""
    sinks = options[_SINKS]
    if forward_ad._current_level >= 0:
        refuse_tangents(function, q=q, k=k, v=v, sinks=sinks)
    if options[_ALIBI_SLOPES] is not None:
        _refuse_gradient(function, options[_ALIBI_SLOPES])
    if sinks is not None:
        sinks = as_float32(sinks)
        options = _replaced(options, _SINKS, sinks)
    if options[_DROPOUT_P] and options[_SEED] is None:
        options = _replaced(options, _SEED, int(torch.randint(2**63 - 1, (), device="cpu")))
    try:
        differentiable = is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        )
    except AttributeError:
        differentiable = False  # one is no tensor; the module says which
    try:
        if differentiable:
            apply = (_AttentionWithLse if return_lse else _Attention).quick_apply
            # Autograd takes time for each argument, even if it is None.
            return apply(q, k, v, options) if sinks is None else apply(q, k, v, options, sinks)
        return _C.forward_with_lse(q, k, v, options) if return_lse else _C.forward(q, k, v, options)
    except _C.Misaligned:
        readable = aligned
    except (TypeError, RuntimeError):
        if differentiable and under_functorch():
            raise NotImplementedError(f"{function}: called under a transform of torch.func, expected none") from None
        dtype = _autocast_dtype(q, k, v)
        if dtype is None:
            raise
        readable = operator.methodcaller("to", dtype)
    return attend(function, readable(q), readable(k), readable(v), options, return_lse)


class _Attention(torch.autograd.Function):
    """Returns out."""

    # (ctx, q, k, v, options, sinks=None): sets ctx.unsaved = (lse, options), saves what else _gradients wants
    forward = staticmethod(_C.saving_forward)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return _gradients(ctx, dout, None, *ctx.unsaved, *ctx.saved_tensors)


class _AttentionWithLse(torch.autograd.Function):
    """Returns (out, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, options, *sinks):
        out, lse = _C.forward_with_lse(q, k, v, options)
        ctx.unsaved = (options,)
        alibi_slopes, *_, sequences = options
        if sequences is not None and not sinks:
            sinks = (None,)
        ctx.save_for_backward(lse, q, k, v, alibi_slopes, out, *sinks, *(sequences or ()))
        ctx.set_materialize_grads(False)  # a loss of one output must not pay for zeros of the other
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        lse, *saved = ctx.saved_tensors
        return _gradients(ctx, dout, dlse, lse, *ctx.unsaved, *saved)


# Function.apply without its Python half, which serves torch.func and takes 3 µs of the 12 of a call with gradients.
for _function in (_Attention, _AttentionWithLse):
    _function.quick_apply = super(torch.autograd.Function, _function).apply


def _gradients(ctx, dout, dlse, lse, options, q, k, v, alibi_slopes, out, sinks=None, *sequences):
    dout = torch.zeros_like(out) if dout is None else _dense(dout)
    if dlse is not None:
        dlse = dlse.contiguous()
    gradients = [
        torch.empty_like(x, memory_format=_CONTIGUOUS) if needed else None
        for x, needed in zip((q, k, v), ctx.needs_input_grad, strict=False)
    ]
    dsinks = torch.empty_like(sinks) if sinks is not None and ctx.needs_input_grad[4] else None
    *scalars, deterministic, _ = options[2:]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = (alibi_slopes, sinks, *scalars, deterministic, sequences or None)
    _C.backward(dout, dlse, q, k, v, out, lse, *gradients, dsinks, options)
    return (*gradients, None) if sinks is None else (*gradients, None, dsinks)


def _replaced(options, place, value):
    return (*options[:place], value, *options[place + 1 :])


def as_float32(sinks):
    """Few numbers, which models keep in their own dtype; autograd casts the gradient back."""
    return sinks.float() if isinstance(sinks, Tensor) and sinks.is_floating_point() else sinks


def _refuse_gradient(function, alibi_slopes):
    if is_grad_enabled() and getattr(alibi_slopes, "requires_grad", False):
        raise NotImplementedError(
            f"{function}: alibi_slopes requires grad, expected slopes that do not: "
            "no kernel computes their gradient; nearest supported: alibi_slopes.detach()"
        )


def refuse_tangents(function, **tensors):
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{function}: {name} carries a forward-mode tangent, expected none: only reverse mode is supported"
            )


def _autocast_dtype(*tensors):
    """What torch.autocast asks for, where it is active and not all tensors are of that dtype; else None."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return None
    device_type = tensors[0].device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return None if all(x.dtype == dtype for x in tensors) else dtype


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
