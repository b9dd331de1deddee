"""Attention of e4m3 numbers, of which `attention` and `attention_varlen` tell users.

Hopper has kernels that multiply them as they are. What those do not serve, and all else on a GPU, is computed in the
dtype of out, of numbers that have been multiplied with their descales; a CPU computes in float32, and rounds weights as
Hopper does. Which kernel serves a call the module says, by refusing it.
"""

from __future__ import annotations

import math

import torch
from torch import is_grad_enabled
from torch.autograd.graph import increment_version

from . import _C
from ._arguments import of_attention, to_attention
from ._core import readable, readable_options, require_tensors
from ._flops import forward_flops
from ._ops import EAGER, define_forward, empty_results
from ._options import (
    ALIBI_SLOPES,
    DENSE_ARGUMENTS,
    DENSE_COUNT,
    FP8,
    FP8_ARGUMENTS,
    RAGGED_ARGUMENTS,
    SEED_ARGUMENT,
    SEQUENCES,
    SINKS,
    replaced,
)

E4M3 = torch.float8_e4m3fn
BLOCKS = (64, 128)
_NOTHING = (None,) * 4
_DESCALES = ("q_descale", "k_descale", "v_descale")


def fp8_option(q_descale, k_descale, v_descale, out_dtype):
    """What only calls of e4m3 numbers are given, or None: the last of the options of attention."""
    if q_descale is None and k_descale is None and v_descale is None and out_dtype is None:
        return None
    return q_descale, k_descale, v_descale, out_dtype


def is_fp8(q, options):
    """Whether a call is one of e4m3 numbers, or has what only such calls have, and is refused."""
    return options[FP8] is not None or getattr(q, "dtype", None) is E4M3


def requires_grad(fp8):
    """Whether a descale does."""
    q_descale, k_descale, v_descale, _ = fp8
    return (
        (q_descale is not None and q_descale.requires_grad)
        or (k_descale is not None and k_descale.requires_grad)
        or (v_descale is not None and v_descale.requires_grad)
    )


def descales_of(options):
    """Those that are given, by name."""
    return {name: x for name, x in zip(_DESCALES, (options[FP8] or _NOTHING)[:3], strict=True) if x is not None}


def refuse_gradients(function, q, k, v, options):
    tensors = (q, k, v, options[SINKS], options[ALIBI_SLOPES], *(options[FP8] or _NOTHING))
    if is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        raise NotImplementedError(
            f"{function}: a gradient is asked for, expected none of {E4M3} numbers; nearest supported: "
            "torch.no_grad(), or attention in 16 bits of what flashtile.fp8.dequantize returns"
        )


def dequantized_forward(q, k, v, options, out=None):
    """(out, lse) of a call that the module has checked and refuses: no kernel multiplies its numbers as they are."""
    *descales, out_dtype = options[FP8] or _NOTHING
    out_dtype = out_dtype or torch.bfloat16
    sequences = options[SEQUENCES]
    begins = (None,) * 3 if sequences is None else (sequences[0], sequences[1], sequences[1])
    q, k, v = (dequantized(*given) for given in zip((q, k, v), descales, begins, strict=True))
    options = replaced(options, FP8, None)
    if q.device.type == "cpu":
        found, lse = _C.forward_rounding_weights(q, k, v, options)
        return found.to(out_dtype) if out is None else out.copy_(found), lse
    return _forward(q.to(out_dtype), k.to(out_dtype), v.to(out_dtype), options, out)


def _forward(q, k, v, options, out=None):
    """(out, lse), of numbers of 8 or 16 bits, without gradients."""
    try:
        found, lse = _C.forward_with_lse(q, k, v, options, out)
    except _C.Unreadable:
        return _forward(readable(q), readable(k), readable(v), readable_options(options), out)
    except NotImplementedError:
        if not is_fp8(q, options):
            raise
        return dequantized_forward(q, k, v, options, out)
    if out is not None:
        increment_version(out)
    return found, lse


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


# ---- operators, by which torch.compile and torch.func know the same


def fp8_operator(function, q, k, v, options, return_lse):
    """What `_autograd.attend` returns of e4m3 numbers, by way of an operator; a seed may be a tensor here."""
    refuse_gradients(function, q, k, v, options)
    require_tensors(function, **descales_of(options))
    *descales, out_dtype = options[FP8] or _NOTHING
    given = of_attention(function, q, options)
    operator = _operators[len(given) > DENSE_COUNT, given[SEED_ARGUMENT] is not None]
    out, lse = operator(q, k, v, *descales, torch.bfloat16 if out_dtype is None else out_dtype, *given)
    return (out, lse) if return_lse else out


def _kernel(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    return _forward(q, k, v, to_attention(*options, fp8=(q_descale, k_descale, v_descale, out_dtype)))


def _fake(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    return empty_results(q, k, v, dtype=out_dtype)


def _flops(q, k, v, q_descale, k_descale, v_descale, out_dtype, *options):
    return forward_flops(q, k, v, *options)


def _define(name, options, *tags):
    arguments = f"Tensor q, Tensor k, Tensor v, {FP8_ARGUMENTS}, {options}"
    return define_forward(name, arguments, _kernel, _fake, _flops, *tags)


_operators = {  # by whether sequences are ragged, and whether there is a seed
    (False, False): _define("attention_fp8", DENSE_ARGUMENTS),
    (False, True): _define("attention_fp8_dropout", DENSE_ARGUMENTS, *EAGER),
    (True, False): _define("attention_varlen_fp8", RAGGED_ARGUMENTS),
    (True, True): _define("attention_varlen_fp8_dropout", RAGGED_ARGUMENTS, *EAGER),
}
