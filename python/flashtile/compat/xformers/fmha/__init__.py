"""``xformers.ops.fmha``: attention and its biases.

What the functions share, in addition to the rules of :func:`flashtile.attention`, which computes the same formula:

- query: (B, M, H, K), or (B, M, K) of one head, or (B, M, G, H, K) of G groups of H heads.
- key: (B, M_kv, H, K), with as many dimensions as query; value (B, M_kv, H, K_v). Where both are the same for all heads
  of the last dimension of heads, by `expand` or because there is one, they are read as one, and not copied. What was
  expanded gets its whole gradient.
- attn_bias: None, or a bias of :mod:`flashtile.compat.xformers.fmha.attn_bias` or of xformers itself, which is known
  by the name of its class. Those of several sequences want B = 1. Or a tensor (B, H, M, M_kv), with as many heads as
  query has dimensions for, that is a padding of keys: it holds 0 and -inf alone, and is alike for all heads and
  queries, by `expand` or sizes of 1. The host waits for its values.
- p: the probability with which a weight is dropped, rounded to a multiple of 1/256. The seed comes from PyTorch's CPU
  generator, so torch.manual_seed repeats it.
- scale: factor of the scores; by default 1/√K.
- op: no effect.
- output_dtype: None or query's dtype.

They return out, (B, M, H, K_v), or as many dimensions as query has. A row that sees no key has out = 0. What is refused
raises NotImplementedError, which names the argument and what is served; ValueError and TypeError are as of
:func:`flashtile.attention`.
"""

import math

import torch
from torch import Tensor

from ...._padding import attend_padded, attend_visible, visible_first
from ....attention import attention
from ....kvcache import attention_kvcache
from ....masks import ColumnMask
from ....varlen import attention_varlen
from ..._common import described, drops, refuse, require_tensors
from . import attn_bias
from ._bands import band_of
from .attn_bias import AttentionBias, BlockDiagonalMask, LowerTriangularMask

__all__ = [
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op=None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Differentiable attention; the arguments are those of all functions here.

    >>> import torch
    >>> from flashtile.compat.xformers import fmha
    >>> q = torch.randn(2, 10, 8, 64)
    >>> k, v = torch.randn(2, 2, 12, 8, 64)
    >>> mask = fmha.attn_bias.LowerTriangularFromBottomRightMask().make_local_attention(4)
    >>> fmha.memory_efficient_attention(q, k, v, attn_bias=mask).shape
    torch.Size([2, 10, 8, 64])
    """
    return _attend("memory_efficient_attention", query, key, value, attn_bias, p, scale, output_dtype)


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op=None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same without a gradient, also where inputs require one."""
    with torch.no_grad():
        return _attend("memory_efficient_attention_forward", query, key, value, attn_bias, p, scale, output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op=None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse): lse is the natural logarithm, float32, (B, H, M) or (B, G, H, M), of queries with three dimensions
    (B, 1, M); -inf where a row sees nothing. Both are differentiable, where xformers asks for a backward pass by
    itself. p has to be 0."""
    function = "memory_efficient_attention_forward_requires_grad"
    if drops(p):
        refuse(function, "p", p, 0)
    return _attend(function, query, key, value, attn_bias, p, scale, output_dtype, return_lse=True)


def _attend(function, query, key, value, bias, p, scale, output_dtype, return_lse=False):
    require_tensors(function, query=query, key=key, value=value)
    if output_dtype not in (None, query.dtype):
        refuse(function, "output_dtype", output_dtype, f"None or {query.dtype}, as query")
    q, k, v = _with_heads(function, query, key, value)
    options = {"scale": scale, "return_lse": return_lse}
    if bias is None:
        result = attend_padded(attention, q, k, v, dropout_p=p, **options)
    elif isinstance(bias, Tensor):
        keys = _visible_keys(function, bias, query, key)
        result = attend_visible(q, k, v, visible_first(keys), dropout_p=p, **options)
    elif hasattr(bias, "q_seqinfo"):
        result = _of_sequences(function, bias, q, k, v, p, options)
    else:
        window = _band(function, bias).window(q.shape[1], k.shape[1])
        result = attend_padded(attention, q, k, v, window=window, dropout_p=p, **options)
    out, *lse = result if return_lse else (result,)
    out = out.reshape(*query.shape[:-1], out.shape[-1])
    return (out, lse[0].unflatten(1, query.shape[2:-1] or (1,))) if return_lse else out


def _with_heads(function, query, key, value):
    """All three as (B, M, heads, K), of keys and values one head where several are the same."""
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4, 5):
        found = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        expected = "all of (B, M, K), (B, M, H, K) or (B, M, G, H, K)"
        raise ValueError(f"{function}: query, key and value have shapes {found}, expected {expected}")
    if query.dim() == 3:
        return query[:, :, None], key[:, :, None], value[:, :, None]
    if all(x.shape[-2] == 1 or x.stride(-2) == 0 for x in (key, value)):
        key, value = key[..., :1, :], value[..., :1, :]
    return tuple(x.flatten(2, -2) for x in (query, key, value))


def _visible_keys(function, bias, query, key):
    """(B, M_kv) bool: what a tensor shows that is a padding of keys."""
    batch, rows, *heads, _ = query.shape
    columns = key.shape[1]
    shape = (batch, *heads, rows, columns)
    if bias.shape != shape:
        raise ValueError(f"{function}: attn_bias has shape {tuple(bias.shape)}, expected {shape}")
    if bias.numel() == 0:
        return torch.ones(batch, columns, dtype=torch.bool, device=bias.device)
    alike = all(n == 1 or step == 0 for n, step in zip(bias.shape[1:-1], bias.stride()[1:-1], strict=True))
    keys = bias[(slice(None), *[0] * (bias.dim() - 2))]
    visible = keys == 0
    if not (bias.is_floating_point() and alike and not bias.requires_grad) or not (visible | (keys == -math.inf)).all():
        found = f"{described(bias)}, {bias.dtype}"
        expected = "a mask of fmha.attn_bias, or one of 0 and -inf that is alike for all heads and queries by `expand`"
        refuse(function, "attn_bias", found, expected)
    return visible


def _band(function, bias):
    band = band_of(bias)
    if band is None:
        refuse(function, "attn_bias", f"of type {type(bias).__name__}", "a mask of fmha.attn_bias")
    return band


def _of_sequences(function, bias, q, k, v, p, options):
    """Of (1, rows of all sequences, heads, K); out without the batch."""
    band, rows = _band(function, bias), bias.q_seqinfo.seqstart_py[-1]
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.shape[0] != 1:
            raise ValueError(f"{function}: {name} has a batch of {x.shape[0]}, expected 1, as attn_bias has sequences")
    if q.shape[1] != rows:
        raise ValueError(f"{function}: query has {q.shape[1]} rows, expected {rows}, as attn_bias has")
    attend = _over_pages if hasattr(bias, "block_tables") else _over_rows
    result = attend(function, bias, band, q[0], k[0], v[0], p, options)
    return (result[0], result[1][None]) if options["return_lse"] else result


def _over_rows(function, bias, band, q, k, v, p, options):
    info, blocks = bias.k_seqinfo, list(bias.k_seqinfo.intervals())
    if info.seqstart_py[-1] != len(k):
        raise ValueError(f"{function}: key has {len(k)} rows, expected {info.seqstart_py[-1]}, as attn_bias has")
    if any(end > start for (_, end), start in zip(blocks, info.seqstart_py[1:], strict=True)):
        refuse(function, "attn_bias", f"of keys {blocks}", "those of each sequence behind those of the one before")
    first, starts = info.seqstart_py[0], info.seqstart
    if first > 0:
        k, v, starts = k[first:], v[first:], starts - first
    sizes = [
        (end - begin, last - start)
        for (begin, end), (start, last) in zip(bias.q_seqinfo.intervals(), blocks, strict=True)
    ]
    windows = {band.window(*size) for size in sizes}
    tables = bias.q_seqinfo.seqstart, starts
    if len(windows) > 1:  # aligned at the top left, sequences of other lengths have other windows
        options |= {"mask": _columns(band, *tables, len(q), len(k))}
    elif windows:
        options |= {"window": windows.pop()}
    return attend_padded(
        attention_varlen,
        q,
        k,
        v,
        cu_seqlens_q=tables[0],
        cu_seqlens_k=tables[1],
        seqused_k=getattr(info, "seqlen", None),
        dropout_p=p,
        **options,
    )


def _columns(band, cu_seqlens_q, cu_seqlens_k, rows, columns):
    """A band that is counted from the first row and column of each sequence."""
    starts = cu_seqlens_k[:-1].repeat_interleave(cu_seqlens_k.diff(), output_size=columns)
    column = torch.arange(columns, dtype=torch.int32, device=starts.device) - starts
    begin, end = torch.zeros_like(column), torch.full_like(column, rows)
    behind = end if band.left is None else column + band.left + 1
    ranges = torch.stack([begin, column - band.right, behind, end], dim=-1)
    return ColumnMask(ranges[None, None], None, (cu_seqlens_q, cu_seqlens_k))


def _over_pages(function, bias, band, q, k, v, p, options):
    if drops(p):
        refuse(function, "p", p, f"0 with a {type(bias).__name__}")
    return attend_padded(
        attention_kvcache,
        q,
        *(x.unflatten(0, (-1, bias.page_size)) for x in (k, v)),
        cache_seqlens=bias.k_seqinfo.seqlen,
        block_table=bias.block_tables,
        cu_seqlens_q=bias.q_seqinfo.seqstart,
        causal=False,
        window=band.window(0, 0),
        **options,
    )
