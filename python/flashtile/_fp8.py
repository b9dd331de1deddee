"""Attention of e4m3 numbers, of which `attention` and `attention_varlen` tell users.

Hopper has kernels that multiply them as they are. What those do not serve, and all else on a GPU, is computed in the
dtype of out, of numbers that have been multiplied with their descales; a CPU computes in float32, and rounds weights as
Hopper does. Which kernel serves a call the module says, by refusing it.
"""

from __future__ import annotations

import math

import torch
from torch import is_grad_enabled
from torch.autograd import profiler

from . import _C
from ._arguments import of_attention, to_attention
from ._autograd import attend, is_traced
from ._core import as_float32, readable, readable_options, recorded, require_tensors, under_functorch
from ._flops import forward_flops
from ._ops import EAGER, define_forward
from ._options import (
    ALIBI_SLOPES,
    DENSE_ARGUMENTS,
    DENSE_COUNT,
    DROPOUT_P,
    RAGGED_ARGUMENTS,
    SEED,
    SEED_ARGUMENT,
    SEQUENCES,
    SINKS,
    replaced,
)

E4M3 = torch.float8_e4m3fn
BLOCKS = (64, 128)
_AT_ONCE = 16  # bytes: head dimensions that kernels read are multiples
_DESCALES = ("q_descale", "k_descale", "v_descale")
_OUT_DTYPES = {"cpu": (torch.bfloat16, torch.float16, torch.float32), "cuda": (torch.bfloat16, torch.float16)}


def is_fp8(q, descales, out_dtype):
    """Whether a call is one of e4m3 numbers, or has what only such calls have, and is refused."""
    q_descale, k_descale, v_descale = descales
    return (
        q_descale is not None
        or k_descale is not None
        or v_descale is not None
        or out_dtype is not None
        or getattr(q, "dtype", None) is E4M3
    )


def attend_fp8(function, q, k, v, descales, out_dtype, options, return_lse):
    """What `attend` returns, of e4m3 numbers."""
    if return_lse is not False and return_lse is not True:
        raise TypeError(f"{function}: return_lse is {_C.described(return_lse)}, expected True or False")
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    _check(function, q, k, v, descales, out_dtype, options)
    options = replaced(options, SINKS, as_float32(options[SINKS]))
    traced = is_traced() or under_functorch()
    if options[DROPOUT_P] and options[SEED] is None:
        seed = torch.randint(2**63 - 1, (), device="cpu")
        options = replaced(options, SEED, seed if traced else int(seed))
    if traced:
        given = of_attention(function, q, options)
        operator = _operators[len(given) > DENSE_COUNT, given[SEED_ARGUMENT] is not None]
        out, lse = operator(q, k, v, *descales, out_dtype, *given)
    elif profiler._is_profiler_enabled:
        with recorded(function, q, k, v):
            out, lse = _forward(function, q, k, v, descales, out_dtype, options, return_lse)
    else:
        out, lse = _forward(function, q, k, v, descales, out_dtype, options, return_lse)
    return (out, lse) if return_lse else out


def _forward(function, q, k, v, descales, out_dtype, options, wants_lse=True):
    """(out, lse) by the first way that serves the call; what is not wanted may be None."""
    if q.device.type != "cpu" and not (q.shape[-1] % _AT_ONCE or v.shape[-1] % _AT_ONCE):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        try:
            return _by_kernel(q, k, v, descales, out_dtype, options, wants_lse)
        except NotImplementedError:
            pass
    sequences = options[SEQUENCES]
    begins = (None,) * 3 if sequences is None else (sequences[0], sequences[1], sequences[1])
    q, k, v = (dequantized(*given) for given in zip((q, k, v), descales, begins, strict=True))
    if q.device.type == "cpu":
        out, lse = _by_kernel(q, k, v, (None,) * 3, torch.float32, options, wants_lse)
        return out.to(out_dtype), lse
    return attend(function, q.to(out_dtype), k.to(out_dtype), v.to(out_dtype), options, True, True)


def _by_kernel(q, k, v, descales, out_dtype, options, wants_lse):
    out, lse = _new_results(q, k, v, out_dtype, wants_lse)
    try:
        _C.forward_fp8(q, k, v, descales, options, out, lse)
    except _C.Unreadable:
        _C.forward_fp8(*map(readable, (q, k, v)), descales, readable_options(options), out, lse)
    return out, lse


def _new_results(q, k, v, out_dtype, wants_lse=True):
    *batch, rows, heads, _ = q.shape if q.dim() > 2 else (0, 0, 0)  # for the module to say what is wrong
    out = q.new_empty((*batch, rows, heads, *v.shape[-1:]), dtype=out_dtype)
    return out, q.new_empty((*batch, heads, rows), dtype=torch.float32) if wants_lse else None


def dequantized(x, descale, sequences=None):
    """`x` times its descales, float32: (B, H) or, of a dense batch, (B, H, blocks). `sequences` says where those of a
    ragged batch begin, (B + 1)."""
    if descale is None or x.dim() != (4 if sequences is None else 3):
        return x.float()  # in the latter case the module says what is wrong
    descale = torch.where(descale >= 0, descale, math.nan)
    rows, heads = x.shape[-3:-1]
    if descale.shape[1] != heads:  # it is that of KV heads
        descale = descale.repeat_interleave(heads // max(descale.shape[1], 1), 1)
    if sequences is not None:
        row = torch.arange(rows, device=x.device, dtype=sequences.dtype)
        sequence = torch.bucketize(row, sequences[1:], right=True).clamp_max(max(descale.shape[0] - 1, 0))
        of_rows = descale[sequence] if descale.shape[0] else descale.new_ones(rows, heads)  # (T, H)
        return x.float() * of_rows[..., None]
    if descale.dim() == 2:
        return x.float() * descale[:, None, :, None]
    fitting = [block for block in BLOCKS if descale.shape[2] == -(-rows // block)]
    of_rows = descale.repeat_interleave(fitting[-1], dim=-1)[..., :rows]  # (B, H, S)
    return x.float() * of_rows.transpose(1, 2)[..., None]


def _check(function, q, k, v, descales, out_dtype, options):
    """Checks what `attend` will not see: e4m3 numbers and their descales."""
    require_tensors(function, q=q, k=k, v=v)
    given = {name: x for name, x in zip(_DESCALES, descales, strict=True) if x is not None}
    if q.dtype is not E4M3:
        raise TypeError(
            f"{function}: q has dtype {q.dtype}, expected {E4M3}, as {next(iter(given), 'out_dtype')} is given"
        )
    for name, x in dict(k=k, v=v).items():
        if x.dtype is not E4M3:
            raise TypeError(f"{function}: {name} has dtype {x.dtype}, expected {E4M3}, as q")
    expected = _OUT_DTYPES["cpu" if q.device.type == "cpu" else "cuda"]
    if out_dtype not in expected:
        raise TypeError(f"{function}: out_dtype is {out_dtype}, expected {' or '.join(map(str, expected))}")
    require_tensors(function, **given)
    for name, x in given.items():
        if x.dtype != torch.float32:
            raise TypeError(f"{function}: {name} has dtype {x.dtype}, expected torch.float32")
        if x.device != q.device:
            raise ValueError(f"{function}: {name} is on {x.device}, expected {q.device}, as q")
    sequences = options[SEQUENCES]
    if sequences is not None:
        require_tensors(function, cu_seqlens_q=sequences[0], cu_seqlens_k=sequences[1])
    if all(x.dim() == (4 if sequences is None else 3) for x in (q, k, v)):  # otherwise the module says what is wrong
        batch = q.shape[0] if sequences is None else sequences[0].numel() - 1
        for name, x in given.items():
            _check_shape(function, name, x, q if name == "q_descale" else k, k, batch, sequences is not None)
    others = (options[SINKS], options[ALIBI_SLOPES], *descales)
    if is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v, *others)):
        raise NotImplementedError(
            f"{function}: a gradient is asked for, expected none of {E4M3} numbers; nearest supported: "
            "torch.no_grad(), or attention in 16 bits of what flashtile.fp8.dequantize returns"
        )


def _check_shape(function, name, descale, of, k, batch, ragged):
    rows, heads = of.shape[-3:-1]
    of_heads = (heads, k.shape[-2])
    counts = [] if ragged else [-(-rows // block) for block in BLOCKS]
    shape = tuple(descale.shape)
    fits = len(shape) == 2 or (len(shape) == 3 and shape[2] in counts)
    if not (fits and shape[0] == batch and shape[1] in of_heads):
        listed = [" or ".join(map(str, dict.fromkeys(numbers))) for numbers in (sorted(counts), of_heads)]
        blocks = "" if ragged else f" or (B, H, {listed[0]}), for blocks of 64 or 128 rows"
        raise ValueError(
            f"{function}: {name} has shape {shape}, expected (B, H){blocks}, where B is {batch} and H {listed[1]}"
        )


# ---- operators, by which torch.compile and torch.func know the same


def _kernel(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    options = to_attention(*options)
    function = "attention" if options[SEQUENCES] is None else "attention_varlen"
    return _forward(function, q, k, v, (q_descale, k_descale, v_descale), out_dtype, options)


def _fake(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    return _new_results(q, k, v, out_dtype)


def _flops(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    return forward_flops(q, k, v, *options)


def _define(name, options, *tags):
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
    return define_forward(name, f"{inputs}, ScalarType out_dtype, {options}", _kernel, _fake, _flops, *tags)


_operators = {  # by whether sequences are ragged, and whether there is a seed
    (False, False): _define("attention_fp8", DENSE_ARGUMENTS),
    (False, True): _define("attention_fp8_dropout", DENSE_ARGUMENTS, *EAGER),
    (True, False): _define("attention_varlen_fp8", RAGGED_ARGUMENTS),
    (True, True): _define("attention_varlen_fp8_dropout", RAGGED_ARGUMENTS, *EAGER),
}
