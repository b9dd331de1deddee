"""Attention of e4m3 numbers, of which `attention` and `attention_varlen` tell users.

No kernel multiplies them as they are yet: they are multiplied with their descales, and attention computes in float32 on
a CPU, and in the dtype of out on a GPU.
"""

from __future__ import annotations

import math

import torch
from torch import is_grad_enabled

from ._autograd import attend
from ._core import require_tensors
from ._options import SEQUENCES, SINKS

E4M3 = torch.float8_e4m3fn
BLOCKS = (64, 128)
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
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    _check(function, q, k, v, descales, out_dtype, options)
    sequences = options[SEQUENCES]
    begins = (None,) * 3 if sequences is None else (sequences[0], sequences[1], sequences[1])
    computed = torch.float32 if q.device.type == "cpu" else out_dtype
    numbers = (dequantized(*given).to(computed) for given in zip((q, k, v), descales, begins, strict=True))
    found = attend(function, *numbers, options, return_lse)
    return (found[0].to(out_dtype), found[1]) if return_lse else found.to(out_dtype)


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
    if is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v, options[SINKS], *descales)):
        raise NotImplementedError(
            f"{function}: a gradient is asked for, expected none of {E4M3} numbers; nearest supported: "
            "torch.no_grad(), or attention in 16 bits of what flashtile.fp8.dequantize returns"
        )


def _check_shape(function, name, descale, of, k, batch, ragged):
    rows, heads = of.shape[-3:-1]
    of_heads = dict.fromkeys((heads, k.shape[-2]))
    counts = sorted({-(-rows // block) for block in BLOCKS})
    shapes = [(batch, h, *blocks) for h in of_heads for blocks in ((), *([] if ragged else [(n,) for n in counts]))]
    if tuple(descale.shape) not in shapes:
        blocks = "" if ragged else f" or (B, H, {' or '.join(map(str, counts))}), for blocks of 64 or 128 rows"
        raise ValueError(
            f"{function}: {name} has shape {tuple(descale.shape)}, expected (B, H){blocks}, where B is {batch} and H "
            f"{' or '.join(map(str, of_heads))}"
        )
