"""Operands as other interfaces allow them: last dimensions that are not contiguous, or no multiples of 8; padding."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .varlen import attention_varlen


def attend_padded(attention, q, k, v, *, scale, **options):
    """``flashtile.attention`` or its like, of copies where the operands are not as these want them. Then the result is
    no `out` that is given, but its caller's to write there."""
    q, k, v = contiguous(q), contiguous(k), contiguous(v)
    head_dim, head_dim_v = last_size(q), last_size(v)
    if head_dim % 8 == 0 == head_dim_v % 8 or last_size(k) != head_dim:
        return attention(q, k, v, scale=scale, **options)
    if scale is None and head_dim > 0:
        scale = head_dim**-0.5
    options.pop("out", None)
    result = attention(padded(q), padded(k), padded(v), scale=scale, **options)
    out, *lse = result if isinstance(result, tuple) else (result,)
    out = out[..., :head_dim_v]
    return (out, *lse) if lse else out


def contiguous(x):
    """`x` with a contiguous last dimension; what is no such tensor stays, for flashtile to say what is wrong."""
    return x.contiguous() if x is not None and _has_strides(x) and x.stride(-1) != 1 else x


def visible_first(visible):
    """(order, count) of `visible` (B, S) bool: the rows of each entry with the visible ones in front, (B, S) int64, and
    how many these are, (B) int32. Everything stays on the device."""
    order = visible.view(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return order, visible.sum(dim=-1, dtype=torch.int32)


def gathered(x, order):
    """Rows of `x` (B, S, H, D) in this order (B, S)."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], order]


def require_values(function, k, v):
    """Refuses values that are not those of the keys, before rows of both are put elsewhere."""
    expected = (*k.shape[:-1], *v.shape[-1:])
    if v.shape != expected:
        sizes = "(B, S_k, H_k, D_v)" if k.dim() == 4 else "(T_k, H_k, D_v)"
        raise ValueError(f"{function}: v has shape {tuple(v.shape)}, expected {expected} = {sizes}")


def attend_visible(q, k, v, keys, queries=None, **options):
    """Attention of the rows that count, where `keys` and `queries` are what :func:`visible_first` says of each. Visible
    keys stand in front, where a length tells them from the others, and so do queries, if they are given: then masks
    are aligned at the last query and the last key that count, distances are in rows that count, and out is 0 elsewhere.
    With return_lse, which goes without `queries`, also lse (B, H_q, S_q)."""
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    if k.shape[0] != batch:
        expected = f"{(batch, *k.shape[1:])} = (B, S_k, H_k, D)"
        raise ValueError(f"attention: k has shape {tuple(k.shape)}, expected {expected}")
    require_values("attention", k, v)
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    result = attend_padded(
        attention_varlen,
        (q if queries is None else gathered(q, queries[0])).flatten(0, 1),
        gathered(k, keys[0]).flatten(0, 1),
        gathered(v, keys[0]).flatten(0, 1),
        cu_seqlens_q=offsets * seqlen_q,
        cu_seqlens_k=offsets * seqlen_k,
        seqused_q=None if queries is None else queries[1],
        seqused_k=keys[1],
        **options,
    )
    out, *lse = result if isinstance(result, tuple) else (result,)
    out = out.unflatten(0, (batch, seqlen_q))
    if lse:
        return out, lse[0].unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    return out if queries is None else gathered(out, queries[0].argsort(dim=-1))


def last_size(x):
    return x.shape[-1] if _has_strides(x) else 0


def _has_strides(x):
    return isinstance(x, Tensor) and x.layout is torch.strided and x.dim() > 0


def padded(x):
    """Zeros change no score, and values of 0 are cut off again."""
    return pad(x, (0, -last_size(x) % 8)) if last_size(x) % 8 != 0 else x
