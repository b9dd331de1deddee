"""Rotary embedding by PyTorch's operations, for the rules of flash-attn that flashtile's kernels do not have."""

import torch
from torch import Tensor

from ._common import index_within, require_rank


def rotated(x, cos, sin, interleaved):
    """`x`, (..., H, D), with the first R elements of each head rotated by the angles of its row, (..., R / 2): in
    float32, rounded once."""
    half = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)
    pairs, dim = ((half, 2), -1) if interleaved else ((2, half), -2)
    a, b = x[..., : 2 * half].to(dtype).unflatten(-1, pairs).unbind(dim)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def positions_of(x, offsets, cu_seqlens=None, counted=True):
    """The position of each row of `x`, (B, S) or (T) int64: `offsets`, (B) or an int, is that of the first row of each
    sequence, and of all its rows unless they are `counted`. Rows behind the last sequence have 0."""
    given = isinstance(offsets, Tensor)
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        row = torch.arange(seqlen, device=x.device) * counted
        return (offsets.long()[:, None] if given else offsets) + row.expand(batch, seqlen)
    row = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], row, right=True)
    first = torch.nn.functional.pad(offsets, (0, 1))[sequence] if given else offsets
    position = first + (row - cu_seqlens[sequence]) * counted
    return torch.where(sequence < cu_seqlens.shape[0] - 1, position, 0).long()


def check_angles(function, x, **tables):
    """Two tables, (positions, R / 2), that rotate elements which the heads of `x` have."""
    expected = f"(positions, R / 2) with R from 2 to D = {x.shape[-1]}"
    require_rank(function, 2, expected, **tables)
    cos, _ = tables.values()
    for name, table in tables.items():
        if not (0 < 2 * table.shape[1] <= x.shape[-1]):
            raise ValueError(f"{function}: {name} has shape {tuple(table.shape)}, expected {expected}")
        if table.shape != cos.shape:
            raise ValueError(f"{function}: {name} has shape {tuple(table.shape)}, expected {tuple(cos.shape)}")
        if not table.is_floating_point():
            raise TypeError(f"{function}: {name} has dtype {table.dtype}, expected a floating dtype")
        if table.device != x.device:
            raise ValueError(f"{function}: {name} is on {table.device}, expected {x.device}")


def angles_at(function, of, position, **tables):
    """The rows of both tables at these positions, which are those of the argument `of`."""
    (name, cos), _ = tables.items()
    index = index_within(function, f"a position of {of}", position, cos.shape[0], name)
    return [table[index] for table in tables.values()]
