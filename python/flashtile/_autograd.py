"""What every attention function has in common: the compiled core, behind autograd where an input asks for it; or, where
PyTorch traces, the operator that stands for both."""

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import increment_version

from . import _C
from ._core import (
    DTYPES,
    as_float32,
    copied_into,
    gradients,
    is_compiling,
    readable,
    readable_options,
    recorded,
    refuse_flag,
    refuse_gradients_into,
    refuse_nested,
    require_place,
    require_tensors,
    takes_operators,
    under_functorch,
)
from ._fp8 import dequantized_forward, descales_of, fp8_operator, is_fp8, refuse_gradients, requires_grad
from ._invariance import is_batch_invariant, with_whole_sequences
from ._ops import attend_operator, differentiable_once, gradient_operator
from ._options import (
    ALIBI_SLOPES,
    BATCH_INVARIANT,
    DROPOUT_P,
    FP8,
    MASK,
    SCALE,
    SEED,
    SEQUENCES,
    SINKS,
    SOFTCAP,
    TENSORS,
    replaced,
)

_count_of_modes = torch._C._len_torch_dispatch_stack
_is_jit_tracing = torch._C._is_tracing
PLAIN = (type(None), float)  # types of numbers that are no tensor; to ask whether one is takes longer
_is_vmapped = torch._C._functorch.is_legacy_batchedtensor  # by is_grads_batched, not by torch.func


def attend(function, q, k, v, options, return_lse, out=None, is_recorded=False):
    """Out, or with `return_lse` (out, lse), of the options as the caller gave them; messages name `function`, and a
    profiler records a call by that name, once. Where the tensor `out` is given, it is written and returned."""
    if return_lse is not False and return_lse is not True:
        refuse_flag(function, "return_lse", return_lse)
    alibi_slopes, sinks, fp8 = options[ALIBI_SLOPES], options[SINKS], options[FP8]
    if forward_ad._current_level >= 0:
        refuse_tangents(function, q=q, k=k, v=v, sinks=sinks, **descales_of(options))
    if alibi_slopes is not None:
        refuse_slopes_that_learn(function, alibi_slopes)
    scale, softcap, dropout_p = options[SCALE], options[SOFTCAP], options[DROPOUT_P]
    if not (type(scale) in PLAIN and type(softcap) in PLAIN and type(dropout_p) in PLAIN):
        refuse_what_learns(function, scale=scale, softcap=softcap, dropout_p=dropout_p)
    if sinks is not None:
        sinks = as_float32(sinks)
        options = replaced(options, SINKS, sinks)
    if options[BATCH_INVARIANT] is None and is_batch_invariant():
        options = replaced(options, BATCH_INVARIANT, True)
    if options[BATCH_INVARIANT] is True and options[SEQUENCES] is not None and not getattr(q, "is_cpu", True):
        options = with_whole_sequences(options, return_lse)
    if out is not None:
        refuse_gradients_into(function, out, q, k, v, sinks, *(fp8 or ()))
    traced = is_compiling() or _count_of_modes() > 0 or _is_jit_tracing()  # is_traced(), 0.05 µs sooner
    try:
        draws = dropout_p and 0 < dropout_p < 1 and options[SEED] is None
    except (RuntimeError, TypeError, ValueError):
        draws = False  # of no number, or of several, which the module refuses
    if draws:
        seed = torch.randint(2**63 - 1, (), device="cpu")
        traced = traced or under_functorch()  # vmap may have drawn many
        options = replaced(options, SEED, seed if traced else int(seed))
    if traced:
        return _attend_traced(function, q, k, v, options, return_lse, out)
    if profiler._is_profiler_enabled and not is_recorded:
        with recorded(function, q, k, v):
            return attend(function, q, k, v, options, return_lse, out, True)
    try:
        differentiable = is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sinks is not None and sinks.requires_grad)
            or (fp8 is not None and requires_grad(fp8))
        )
    except AttributeError:
        differentiable = False  # one is no tensor; the module says which
    try:
        if differentiable:
            apply = (_AttentionWithLse if return_lse else _Attention).quick_apply
            # Autograd takes time for each argument, even if it is None.
            return apply(q, k, v, options) if sinks is None else apply(q, k, v, options, sinks)
        result = _C.forward_with_lse(q, k, v, options, out) if return_lse else _C.forward(q, k, v, options, out)
        if out is not None:
            increment_version(out)
        return result
    except _C.Unreadable:
        q, k, v, options = readable(q), readable(k), readable(v), readable_options(options)
    except (TypeError, RuntimeError) as refusal:
        refuse_nested(function, q=q, k=k, v=v)
        if takes_operators(q, k, v):
            return _attend_traced(function, q, k, v, options, return_lse, out)
        if is_fp8(q, options):
            if not isinstance(refusal, NotImplementedError):
                raise
            refuse_gradients(function, q, k, v, options)
            out, lse = dequantized_forward(q, k, v, options, out)
            return (out, lse) if return_lse else out
        dtype = _autocast_dtype(q, k, v)
        if dtype is None:
            raise
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return attend(function, q, k, v, options, return_lse, out, True)


def is_traced():
    """Whether operators are wanted: by torch.compile, a mode such as those of fake tensors and make_fx, or
    torch.jit.trace, which would take a result that it saw nobody write for a constant."""
    return is_compiling() or _count_of_modes() > 0 or _is_jit_tracing()


def _attend_traced(function, q, k, v, options, return_lse, out):
    """Casts as eager calls do, who ask the module what it serves."""
    require_tensors(function, q=q, k=k, v=v)
    if is_fp8(q, options):
        result = fp8_operator(function, q, k, v, options, return_lse)
    else:
        q, k, v = cast_as_eager_calls_do(q, k, v)
        result = attend_operator(function, q, k, v, options, return_lse)
    if out is not None:
        found = result[0] if return_lse else result
        require_place(function, out, found.shape, found.dtype, found.device, dict(q=q, k=k, v=v))
    return copied_into(out, result)


def cast_as_eager_calls_do(q, k, v):
    """For those who cannot ask the module what it serves, and cast where it refuses, as eager calls do."""
    dtype = _autocast_dtype(q, k, v)
    if dtype is None or (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES[q.device.type]):
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)


class _Attention(torch.autograd.Function):
    """Returns out."""

    # (ctx, q, k, v, options, sinks=None): sets ctx.unsaved = (state, options), saves what else _gradients wants
    forward = staticmethod(_C.saving_forward)

    @staticmethod
    def backward(ctx, dout):
        return _gradients(ctx, dout, None, *ctx.unsaved, *ctx.saved_tensors)


class _AttentionWithLse(torch.autograd.Function):
    """Returns (out, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, options, *sinks):
        out, lse, state = _C.forward_with_state(q, k, v, options)
        ctx.unsaved = (options,)
        sequences = options[SEQUENCES]
        mask = options[MASK]
        if sequences is not None or mask is not None:
            sinks = (*(sinks or (None,)), mask)
        ctx.save_for_backward(state, q, k, v, options[ALIBI_SLOPES], out, *sinks, *(sequences or ()))
        ctx.set_materialize_grads(False)  # a loss of one output must not pay for zeros of the other
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        state, *saved = ctx.saved_tensors
        return _gradients(ctx, dout, dlse, state, *ctx.unsaved, *saved)


# Function.apply without its Python half, which serves torch.func and takes 3 µs of the 12 of a call with gradients.
for _function in (_Attention, _AttentionWithLse):
    _function.quick_apply = super(torch.autograd.Function, _function).apply


def _gradients(ctx, *given):
    """Where gradients get a graph of their own (create_graph), all that they depend on is told to autograd, whatever
    the incoming ones are: it must not take the gradients for constants."""
    compute = _gradients_with_graph if is_grad_enabled() else _gradients_of
    return compute(ctx.needs_input_grad, *given)


def _gradients_of(needed, dout, dlse, state, options, q, k, v, alibi_slopes, out, sinks=None, mask=None, *sequences):
    needed = (*needed[:3], sinks is not None and needed[4])
    options = (alibi_slopes, sinks, mask, *options[TENSORS:SEQUENCES], sequences or None, None, None)
    function = "attention_varlen" if sequences else "attention"
    given = (needed, dout, dlse, q, k, v, out)
    try:
        if profiler._is_profiler_enabled:
            with recorded(f"{function}_backward", dout, q, k, v):
                *found, dsinks = gradients(*given, state, options)
        else:
            *found, dsinks = gradients(*given, state, options)
    except (TypeError, RuntimeError):
        # Of many incoming gradients each has a call of the operator.
        if not takes_operators(dout, dlse) and not any(x is not None and _is_vmapped(x) for x in (dout, dlse)):
            raise
        if not isinstance(state, Tensor):  # but memory that no operator takes
            _, _, state = _C.forward_with_state(q, k, v, options)
        *found, dsinks = gradient_operator(function, *given, state, options)
    return (*found, None) if sinks is None else (*found, None, dsinks)


_gradients_with_graph = differentiable_once(_gradients_of)


def refuse_slopes_that_learn(function, alibi_slopes):
    refuse_what_learns(function, alibi_slopes=alibi_slopes)


def refuse_what_learns(function, **options):
    """Options that are tensors, or numbers held by some: they would silently have no gradient."""
    if forward_ad._current_level >= 0:
        refuse_tangents(function, **options)
    if is_grad_enabled():
        for name, x in options.items():
            if isinstance(x, Tensor) and x.requires_grad:
                raise NotImplementedError(
                    f"{function}: {name} requires grad, expected no gradient to be asked of it, as no kernel computes "
                    f"that; nearest supported: {name}.detach()"
                )


def refuse_tangents(function, **operands):
    for name, x in operands.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{function}: {name} carries a forward-mode tangent, expected none: only reverse mode is supported"
            )


def _autocast_dtype(*tensors):
    """What torch.autocast asks for, where it is active and not all tensors are of that dtype; else None."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
        return None
    device_type = tensors[0].device.type
    if device_type not in DTYPES or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return None if all(x.dtype == dtype for x in tensors) else dtype
