"""Attention of e4m3 numbers, of which `attention` and `attention_varlen` tell users.

Hopper has kernels that multiply them as they are. What no such kernel serves (other GPUs, dropout, column masks, head
dimensions that are no multiples of 16) is computed in the dtype of out, from numbers that have been multiplied with
their descales. The module says what that is, by refusing it.
"""

from __future__ import annotations

import math

import torch
from torch import is_grad_enabled

from . import _C
from ._arguments import of_attention, to_attention
from ._core import as_float32, is_compiling, readable, readable_options, refuse_nested, require_tensors, under_functorch
from ._flops import count_flops, forward_flops
from ._ops import EAGER, RESULTS, define
from ._options import (
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
_OUT_DTYPES = {"cpu": (torch.bfloat16, torch.float16, torch.float32), "cuda": (torch.bfloat16, torch.float16)}
_AT_ONCE = 16  # bytes that CUDA kernels read


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
    """What `_autograd.attend` returns, of e4m3 numbers."""
    if return_lse is not False and return_lse is not True:
        raise TypeError(f"{function}: return_lse is {_C.described(return_lse)}, expected True or False")
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    _check(function, q, k, v, descales, out_dtype, options[SINKS])
    options = replaced(options, SINKS, as_float32(options[SINKS]))
    if options[DROPOUT_P] and options[SEED] is None:
        seed = torch.randint(2**63 - 1, (), device="cpu")
        options = replaced(options, SEED, seed if is_compiling() else int(seed))
    if is_compiling() or under_functorch():
        given = of_attention(function, q, options)
        kind = len(given) > DENSE_COUNT, given[SEED_ARGUMENT] is not None
        out, lse = _operators[kind](q, k, v, *descales, out_dtype, *given)
        return (out, lse) if return_lse else out
    out, lse = _forward(q, k, v, descales, out_dtype, options, return_lse)
    return (out, lse) if return_lse else out


def dequantized(x, descale, sequences=None, used=None):
    """`x`, float32, times its descales, as `ForwardTensors` has them; `sequences` are the (B + 1) begins of a ragged
    batch."""
    if descale is None:
        return x.float()
    descale = torch.where(descale >= 0, descale, math.nan)
    rows, heads = x.shape[-3:-1]
    descale = descale.repeat_interleave(heads // max(descale.shape[1], 1), 1) if descale.shape[1] != heads else descale
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


def _check(function, q, k, v, descales, out_dtype, sinks):
    require_tensors(function, q=q, k=k, v=v)
    refuse_nested(function, q=q, k=k, v=v)
    names = ("q_descale", "k_descale", "v_descale")
    if q.dtype is not E4M3:
        name = next((name for name, x in zip(names, descales, strict=True) if x is not None), "out_dtype")
        raise TypeError(f"{function}: q has dtype {q.dtype}, expected {E4M3}, as {name} is given")
    for name, x in dict(k=k, v=v).items():
        if x.dtype is not E4M3:
            raise TypeError(f"{function}: {name} has dtype {x.dtype}, expected {E4M3}, as q")
    expected = _OUT_DTYPES["cpu" if q.device.type == "cpu" else "cuda"]
    if out_dtype not in expected:
        raise TypeError(f"{function}: out_dtype is {out_dtype}, expected {' or '.join(map(str, expected))}")
    batch = q.shape[0] if q.dim() == 4 else None
    for name, of, x in zip(names, (q, k, v), descales, strict=True):
        if x is not None:
            require_tensors(function, **{name: x})
            _check_descale(function, name, x, of, k, batch)
    if is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks, *descales)):
        raise NotImplementedError(
            f"{function}: a gradient is asked for, expected none of {E4M3} numbers; nearest supported: "
            "torch.no_grad(), or attention in 16 bits of what flashtile.fp8.dequantize returns"
        )


def _check_descale(function, name, descale, of, k, batch):
    if descale.dtype != torch.float32:
        raise TypeError(f"{function}: {name} has dtype {descale.dtype}, expected torch.float32")
    if descale.device != of.device:
        raise ValueError(f"{function}: {name} is on {descale.device}, expected {of.device}, as q")
    if of.dim() not in (3, 4) or k.dim() != of.dim():
        return  # the module says what is wrong
    ragged = of.dim() == 3
    rows, heads = of.shape[-3:-1]
    counts = {-(-rows // block) for block in BLOCKS}
    fits = (
        descale.dim() in ((2,) if ragged else (2, 3))
        and (ragged or descale.shape[0] == batch)
        and descale.shape[1] in (heads, k.shape[-2])
        and (descale.dim() == 2 or descale.shape[2] in counts)
    )
    if not fits:
        blocks = "" if ragged else f" or (B, H, {' or '.join(map(str, sorted(counts)))}), for blocks of 64 or 128 rows"
        all_heads = " or ".join(map(str, dict.fromkeys((heads, k.shape[-2]))))
        raise ValueError(
            f"{function}: {name} has shape {tuple(descale.shape)}, expected (B, H){blocks}, where H is {all_heads}"
        )


def _forward(q, k, v, descales, out_dtype, options, return_lse):
    sequences = options[SEQUENCES]
    begins = (None,) * 3 if sequences is None else (sequences[0], sequences[1], sequences[1])
    if not (q.shape[-1] % _AT_ONCE or v.shape[-1] % _AT_ONCE):
        try:
            return _by_kernel(*map(_words, (q, k, v)), descales, out_dtype, options, return_lse)
        except NotImplementedError:
            pass  # no kernel of 8 bits serves it, on a CPU none
    q, k, v = (dequantized(x, y, z) for x, y, z in zip((q, k, v), descales, begins, strict=True))
    if not q.is_cuda:
        out, lse = _by_kernel(q, k, v, (None,) * 3, torch.float32, options, return_lse)
        return out.to(out_dtype), lse
    q, k, v = q.to(out_dtype), k.to(out_dtype), v.to(out_dtype)
    options = readable_options(options)
    return _C.forward_with_lse(q, k, v, options) if return_lse else (_C.forward(q, k, v, options), None)


def _by_kernel(q, k, v, descales, out_dtype, options, return_lse):
    out, lse = _new_results(q, k, v, out_dtype)
    if not return_lse:
        lse = None
    try:
        _C.forward_fp8(q, k, v, descales, options, out, lse)
    except _C.Unreadable:
        _C.forward_fp8(*map(readable, (q, k, v)), descales, readable_options(options), out, lse)
    return out, lse


def _words(x):
    """Four numbers in one int32, which is how the module takes them."""
    if x.stride(-1) != 1 or x.storage_offset() % 4 or any(stride % 4 for stride in x.stride()[:-1]):
        x = x.contiguous()
    return x.view(torch.int32)


def _new_results(q, k, v, out_dtype):
    *batch, rows, heads, _ = q.shape if q.dim() > 2 else (0, 0, 0)
    width = v.shape[-1] * (4 if v.dtype is torch.int32 else 1)
    out = q.new_empty((*batch, rows, heads, width), dtype=out_dtype)
    return out, q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _kernel(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    return _forward(q, k, v, (q_descale, k_descale, v_descale), out_dtype, to_attention(*options), True)


def _fake(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    return _new_results(q, k, v, out_dtype)


def _flops(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    return forward_flops(q, k, v, *options)


def _define(name, options, *tags):
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
    call = define(name, f"{inputs}, ScalarType out_dtype, {options}", RESULTS, _kernel, _fake, *tags)
    count_flops(call, _flops)
    return call


_operators = {  # by whether sequences are ragged, and whether there is a seed
    (False, False): _define("attention_fp8", DENSE_ARGUMENTS),
    (False, True): _define("attention_fp8_dropout", DENSE_ARGUMENTS, *EAGER),
    (True, False): _define("attention_varlen_fp8", RAGGED_ARGUMENTS),
    (True, True): _define("attention_varlen_fp8_dropout", RAGGED_ARGUMENTS, *EAGER),
}
