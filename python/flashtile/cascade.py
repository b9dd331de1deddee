"""Attention over a prefix that all sequences share, read once for all of them, and a cache of each one's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from . import _C
from ._autograd import is_traced
from ._core import copied_into, refuse_gradients_into, require_tensors, takes_operators
from .combine import combine
from .kvcache import attention_kvcache, require_place_over_cache
from .masks import ColumnMask

_FUNCTION = "attention_cascade"


@overload
def attention_cascade(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    prefix_seqlen: Tensor | int | None = None,
    prefix_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention_cascade(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    prefix_seqlen: Tensor | int | None = None,
    prefix_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_cascade(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    prefix_seqlen: Tensor | int | None = None,
    prefix_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_cascade(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    prefix_seqlen: Tensor | int | None = None,
    prefix_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of new queries over a prefix of keys that all sequences share, and over a cache of their own.

    What :func:`attention_kvcache` gives for caches in which each sequence has the rows of the prefix in front of its
    own, but the prefix is read once, not once for each sequence::

        keys, values = [k_prefix, own keys], [v_prefix, own values]        of sequence b
        out[b]       = attention(q[b], keys, values, causal=True, ...)

    All queries come behind the prefix and see all of it. So it takes two calls of :func:`attention_kvcache`, one in
    which the queries of all sequences stand as those of one, and a kernel that puts both together as :func:`combine`
    does. That pays where many sequences share many keys, such as a system prompt, and each has few of its own. There is
    no backward.

    Args:
        q: (B, S_q, H_q, D), or ragged, (T_q, H_q, D), with ``cu_seqlens_q``; as in :func:`attention_kvcache`.
        k_prefix: (S_p, H_k, D), of k_cache's dtype and device: the shared keys. With ``prefix_table`` a cache in pages,
            (pages, page_size, H_k, D), which may be k_cache itself.
        v_prefix: (S_p, H_k, D_v), or (pages, page_size, H_k, D_v).
        k_cache: (B_cache, S_cache, H_k, D), or with ``block_table`` (pages, page_size, H_k, D), as in
            :func:`attention_kvcache`: the keys behind the prefix.
        v_cache: (B_cache, S_cache, H_k, D_v), or (pages, page_size, H_k, D_v).
        cache_seqlens: (B), int32, or an int: how many rows of its own each sequence has in the cache before k_new,
            those of the prefix not among them. May be 0.
        prefix_seqlen: (1), int32, on q's device, or an int: how many rows the prefix has; by default S_p. Needed with
            ``prefix_table``.
        prefix_table: (pages of the prefix), int32: row r of the prefix lies in page prefix_table[r // page_size]. Where
            sequences share their first n pages, these are block_table[0, :n], and their own block_table[:, n:].
        k_new: keys to append, as in :func:`attention_kvcache`.
        v_new: their values.
        block_table: (B, pages of a sequence), int32, of the rows behind the prefix.
        cache_batch_idx: (B), int32: the entry of a contiguous cache that each sequence has, instead of b.
        cu_seqlens_q: (B + 1), int32: q is ragged.
        causal: hide columns right of the diagonal, on which the last query of a sequence meets its last own key. Where
            a sequence has more queries than own keys, the first ones see the prefix alone, and all of it.
        mask: a :class:`flashtile.masks.ColumnMask` of the queries and of each sequence's last own keys.
        scale: factor of the scores; by default 1/√D.
        softcap: bound of the scores; 0: none.
        sinks: (H_q): a logit for each query head that no value belongs to.
        k_descale: of caches of 8-bit numbers, of both: one number for all, () or (1); or, where the prefix is in pages
            of k_cache itself, one for each of its rows and heads.
        v_descale: likewise.
        out: a tensor for the result, (B, S_q, H_q, D_v) or (T_q, H_q, D_v), of its dtype, which it is copied to, and
            which is returned then.
        return_lse: also return lse.

    What goes by the distance of a query from a key is not served, as that would be another in each part: windows, ALiBi
    and rotary embedding, so queries and new keys are given rotated.

    Returns:
        out, of q's shape with D_v and of q's dtype; with ``return_lse`` the pair (out, lse), lse float32, (B, H_q, S_q)
        or (H_q, T_q). The result of each call is rounded to q's dtype before they are combined.

    Raises:
        TypeError, ValueError, NotImplementedError: what :func:`attention_kvcache` raises, in its name where an operand
            of a call is wrong; the prefix is a cache of one sequence, whose queries are those of all.

    Example:
        >>> import torch, flashtile
        >>> k_cache, v_cache = torch.randn(2, 40, 16, 2, 64)                  # 40 pages of 16 rows
        >>> prefix = torch.arange(4, dtype=torch.int32)                       # pages that both sequences begin with
        >>> own = torch.tensor([[7, 30], [12, 9]], dtype=torch.int32)         # two further ones for each
        >>> held = torch.tensor([20, 3], dtype=torch.int32)                   # rows in these
        >>> q = torch.randn(2, 1, 8, 64)
        >>> out = flashtile.attention_cascade(
        ...     q, k_cache, v_cache, k_cache, v_cache, cache_seqlens=held, block_table=own,
        ...     prefix_table=prefix, prefix_seqlen=64,
        ... )
        >>> table = torch.cat([prefix.expand(2, 4), own], dim=1)
        >>> whole = flashtile.attention_kvcache(q, k_cache, v_cache, cache_seqlens=64 + held, block_table=table)
        >>> torch.allclose(out, whole, atol=1e-5)
        True

    Sources: cascade inference (Ye et al. 2024, FlashInfer), Hydragen (Juravsky et al. 2024, arXiv:2402.05099).
    """
    if return_lse is not False and return_lse is not True:
        raise TypeError(f"{_FUNCTION}: return_lse is {_C.described(return_lse)}, expected True or False")
    require_tensors(_FUNCTION, q=q, k_prefix=k_prefix, v_prefix=v_prefix, k_cache=k_cache, v_cache=v_cache)
    if cu_seqlens_q is None:
        _require_rank("q", q, 4, "(B, S_q, H_q, D)")
        all_queries = None
    else:
        require_tensors(_FUNCTION, cu_seqlens_q=cu_seqlens_q)
        _require_rank("q", q, 3, "(T_q, H_q, D)")
        _require_rank("cu_seqlens_q", cu_seqlens_q, 1, "(B + 1)")
        all_queries = torch.cat([cu_seqlens_q[:1], cu_seqlens_q[-1:]])
    if v_prefix.shape[-1:] != v_cache.shape[-1:]:
        raise ValueError(
            f"{_FUNCTION}: v_prefix has shape {tuple(v_prefix.shape)}, expected D_v of v_cache, {tuple(v_cache.shape)}"
        )
    if out is not None:
        refuse_gradients_into(_FUNCTION, out)
        prefix = dict(k_prefix=k_prefix, v_prefix=v_prefix)
        require_place_over_cache(_FUNCTION, out, q, k_cache, v_cache, k_new, v_new, **prefix)
    if prefix_table is None:
        _require_rank("k_prefix", k_prefix, 3, "(S_p, H_k, D)")
        prefix_seqlen = len(k_prefix) if prefix_seqlen is None else prefix_seqlen
        k_prefix, v_prefix = k_prefix[None], v_prefix[None]
    elif prefix_seqlen is None:
        raise ValueError(f"{_FUNCTION}: prefix_seqlen is None, expected a length, as prefix_table is given")
    else:
        require_tensors(_FUNCTION, prefix_table=prefix_table)
        prefix_table = prefix_table[None]

    # The queries of all sequences as those of one.
    of_prefix, lse_of_prefix = attention_kvcache(
        q.flatten(0, 1)[None] if all_queries is None else q,
        k_prefix,
        v_prefix,
        cache_seqlens=prefix_seqlen,
        block_table=prefix_table,
        cu_seqlens_q=all_queries,
        causal=False,
        scale=scale,
        softcap=softcap,
        k_descale=k_descale,
        v_descale=v_descale,
        return_lse=True,
    )
    if all_queries is None:
        of_prefix = of_prefix[0].unflatten(0, q.shape[:2])
        lse_of_prefix = lse_of_prefix[0].unflatten(1, q.shape[:2]).transpose(0, 1)
    of_own, lse_of_own = attention_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        k_new=k_new,
        v_new=v_new,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        k_descale=k_descale,
        v_descale=v_descale,
        return_lse=True,
    )
    outs, lses = (of_prefix, of_own), (lse_of_prefix, lse_of_own)
    if is_traced() or takes_operators(*outs):
        results = combine(outs, lses)
    elif cu_seqlens_q is None:
        results = _merged(outs, lses)
    else:
        whole, lse = _merged([x[None] for x in outs], [x[None] for x in lses])
        results = whole[0], lse[0]
    return copied_into(out, results if return_lse else results[0])


def _require_rank(name: str, x: Tensor, rank: int, sizes: str) -> None:
    if x.dim() != rank:
        raise ValueError(f"{_FUNCTION}: {name} has shape {tuple(x.shape)}, expected {sizes}")


def _merged(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What `combine` returns, by a kernel that reads each result once. It takes the state of a row's softmax for its
    lse: what its scores are relative to, and the logarithm of the sum of their weights."""
    references = torch.stack(list(lses))  # (part, B, H_q, S_q)
    states = torch.stack([references, references.masked_fill(references > -math.inf, 0)], dim=1)
    out, state = torch.empty_like(outs[0], memory_format=torch.contiguous_format), torch.empty_like(states[0])
    parts = [(0, out.shape[1], x, of_rows) for x, of_rows in zip(outs, states, strict=True)]
    _C.merge(out, state, parts, 1.0, False)
    return out, torch.add(state[0], state[1], alpha=math.log(2))
