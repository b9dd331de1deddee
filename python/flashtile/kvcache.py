"""Attention over a cache of keys and values, contiguous or in pages: decoding and prefill."""

import operator
from typing import Any, Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad, profiler

from . import _C
from ._autograd import PLAIN, is_traced, refuse_tangents, refuse_what_learns
from ._core import (
    as_float32,
    copied_into,
    entries_of,
    is_compiling,
    recorded,
    refuse_flag,
    refuse_gradients_into,
    refuse_nested,
    require_place,
    require_tensors,
    takes_operators,
)
from ._invariance import is_batch_invariant
from ._max_logits import keeps_bits, largest_scores_over_cache, new_max_logits, require_room
from ._misnamed import hides_misnamed, refuse_misnamed
from ._ops import call_kvcache, kvcache_operator
from .attention import Window
from .masks import ColumnMask, ranges_of

_FLOATS = "q k_new v_new rotary_cos rotary_sin k_cache v_cache alibi_slopes sinks k_descale v_descale".split()


@overload
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    return_lse: bool,
    return_max_logits: Literal[False] = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: Literal[True],
) -> tuple[Tensor, ...]: ...
@overload
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool,
) -> Tensor | tuple[Tensor, ...]: ...
@hides_misnamed
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    attn_mask: object = ...,  # refused, as the next: see _misnamed.py
    is_causal: object = ...,
    *,
    cache_seqlens: Tensor | int,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention of new queries over a cache of keys and values, which may be given new rows first.

    Sequence b has the rows 0, 1, 2, ... of a cache. It holds cache_seqlens[b] of them. If ``k_new`` and ``v_new`` are
    given, their rows are written into the cache behind those, in place. Then all rows from leftpad[b] (or 0) up to the
    last one written are the sequence's keys and values, and its queries attend to them as in :func:`attention`::

        held, end     = cache_seqlens[b], cache_seqlens[b] + S_new
        cache[held + i] = rotated(k_new[b, i], position=held + i), v_new[b, i]       if they are given
        keys, values  = cache[leftpad[b] : end]
        queries[i]    = rotated(q[b, i], position=end - S_q + i)
        out[b]        = attention(queries, keys, values, causal=True, ...)

    So masks are aligned at the bottom right: the last query of a sequence meets its last key. S_q may be 1 (decoding),
    a few (speculative decoding), or many (prefill, whole or in chunks). There is no backward.

    Args:
        q: (B, S_q, H_q, D). float16 or bfloat16; on the CPU also float32. D is a multiple of 8, at most 256. Not
            changed, also where it is rotated. With ``cu_seqlens_q`` ragged: (T_q, H_q, D).
        k_cache: (B_cache, S_cache, H_k, D), of q's dtype and device: a contiguous cache, in which sequence b has the
            entry b. With ``block_table`` a paged one: (pages, page_size, H_k, D), of any page size from 1 on. H_q is a
            multiple of H_k. Or of numbers of 8 bits, float8_e4m3fn or float8_e5m2, half the bytes to read, which a call
            takes times ``k_descale``; on CUDA D is a multiple of 16 then. See docs/fp8.md.
        v_cache: (B_cache, S_cache, H_k, D_v), or (pages, page_size, H_k, D_v), of k_cache's dtype. D_v may differ from
            D.
            q, the caches, k_new and v_new take any strides with a contiguous last dimension. CUDA kernels read 16 bytes
            at a time: operands whose addresses or strides are no multiples of 16 bytes are copied first, and so is what
            PyTorch negates lazily; but caches, which are written in place, are refused then. Nothing is cast under
            torch.autocast. Where k_new is given, no element of one cache may be one of the other; q, k_new and v_new
            may lie in the caches, and are copied first.
        cache_seqlens: (B), int32, contiguous, on q's device: how many rows of each sequence the cache holds before
            k_new. An int is the same for all.
        k_new: (B, S_new, H_k, D), of q's dtype and device: keys to append. S_new need not be S_q. Where q is
            ragged: (T_q, H_k, D), with q's ``cu_seqlens_q``. Rows that find no room behind the held ones are not
            written and do not count. A cache of 8-bit numbers gets the nearest ones to k_new / k_descale, and the
            largest for what is beyond that.
        v_new: (B, S_new, H_k, D_v), or (T_q, H_k, D_v): their values. Given if and only if k_new is.
        block_table: (B, pages of a sequence), int32, last dimension contiguous, on q's device: row r of sequence b lies
            in page block_table[b, r // page_size], in row r % page_size of it. Sequences may share pages, but for
            rows that are written. Entries behind a sequence's last row are not looked at.
        cache_batch_idx: (B), int32, contiguous, on q's device: the entry of a contiguous cache that each sequence has,
            instead of b. Not with block_table.
        leftpad: (B), int32, contiguous, on q's device: rows at the beginning of each sequence that do not count, but
            have positions.
        rotary_cos: (positions, R / 2), of q's dtype, on q's device: cosines by which the first R elements of queries
            and new keys are rotated, in float32, rounded once. R is a multiple of 16, at most D. A row's position
            is its number in the sequence, from 0 on, leftpad's rows included; a query's is that of the key it meets on
            the diagonal. Where a sequence has more queries than rows, causal must hide all keys from the first ones.
        rotary_sin: (positions, R / 2): the sines. Given if and only if rotary_cos is. Without k_new only queries are
            rotated.
        rotary_interleaved: rotate the pairs of elements (2i, 2i + 1), as in RoFormer and GPT-J; False: (i, i + R / 2),
            as in GPT-NeoX and Llama.
        cu_seqlens_q: (B + 1), int32, contiguous, on q's device: q is ragged, and sequence b has its rows
            cu_seqlens_q[b] up to cu_seqlens_q[b + 1]. Starts at 0, never decreases, ends at T_q or before.
        causal: hide columns right of the diagonal. Unlike in :func:`attention`, this is the default.
        window: (left, right), inclusive distances from the diagonal, in tokens; None on a side: unbounded. A negative
            one puts all of the window on the other side: (None, -1) hides a row's own column too, (100, -50) shows the
            columns 50 to 100 behind it. With left + right < 0 no row sees anything.
        mask: a :class:`flashtile.masks.ColumnMask` of the queries and of the last N keys of each sequence, where N is
            the number of its columns: column c is row end - N + c of the cache. So that of a tree of drafted tokens,
            which are the last keys, is `ColumnMask.tree`. Keys before are not hidden, and columns that would come
            before a sequence's first key are no key's. It has B entries, or one for all sequences, also where q is
            ragged: rows are counted within their sequence then, and the mask's S_q is not looked at. rotary_cos goes by
            the place in the sequence: tokens of a tree that should be rotated by their depth are given rotated.
        scale: factor of the scores, any finite number; by default 1/√D.
        softcap: bound of the scores, in units of scaled scores; 0: none.
        alibi_slopes: float32, (H_q) or (B, H_q), of any strides.
        sinks: (H_q), any floating dtype and stride, summed in float32: a logit for each query head that no value
            belongs to.
        k_descale: of caches of 8-bit numbers: what keys are multiplied with, float32, of any strides, on q's device.
            One number for all, () or (1); one for each sequence and head, (B, H_k); or one for each row and head,
            (B_cache, S_cache, H_k) or (pages, page_size, H_k). Rows of k_new get one of their own there, which is
            written: their largest element over the largest number, 448 or 57344. None: 1.
        v_descale: the same of values. Both are given for each row, or neither.
        num_splits: parts that the keys of a sequence are divided into, which may be computed at the same time; 0: as
            many as fill the GPU. Results differ in their last bits. Nothing depends on it on the CPU.
        batch_invariant: a row's result depends, to the bit, on its query and its sequence's keys alone: not on the
            other sequences of the batch, nor on how many queries come at a time, nor on where the cache's pages lie.
            Only with num_splits=0. By default what :func:`batch_invariant_mode` says. On the CPU it always holds.
        out: a tensor for the result, which is returned then: (B, S_q, H_q, D_v) or (T_q, H_q, D_v), of the result's
            dtype, on q's device, of any strides with a contiguous last dimension, on CUDA multiples of 16 bytes, and of
            memory that is not that of q, caches and new rows. Kernels write to it at once; only where PyTorch traces
            the call, the result is copied there.
        return_lse: also return lse.
        return_max_logits: also return the largest score of each head over the queries of a sequence, exactly, scaled,
            after softcap, with ALiBi. Sinks do not count.

    Returns:
        out, (B, S_q, H_q, D_v), or (T_q, H_q, D_v), contiguous, of q's dtype; with ``return_lse`` the pair (out, lse),
        where lse is the natural logarithm, float32, (B, H_q, S_q), or (H_q, T_q). With ``return_max_logits`` the last
        of the results is the largest scores, float32, (B, H_q), -inf where no query of a sequence sees a key: (out,
        max_logits), or (out, lse, max_logits). Runs repeat to the bit. A row that sees no column has out = 0, lse =
        -inf (or the sink). Rows of a ragged q behind the last sequence are not looked at: out = 0, lse = -inf. So it is
        with cache rows that do not count: they may hold anything.

    Raises:
        TypeError: an argument has the wrong type or dtype, such as tables of int64; or it is attn_mask or is_causal,
            which :func:`scaled_dot_product_attention` takes.
        ValueError: shapes, strides, devices or option values break the rules above, or the mask is of a ragged batch;
            on the CPU also what the tables hold (cache_seqlens, block_table where it is needed, cache_batch_idx, which
            must not name an entry twice where k_new is given, leftpad, cu_seqlens_q), rows that find no room, rows of
            shared pages that are written, and positions that rotary_cos lacks.
            On CUDA the host does not read them, so that it need not wait and calls can be captured in a graph, whose
            replays go by what the tables hold then: values that break the rules are taken as the nearest ones that do
            not, nothing outside the tensors is read or written, and it is unspecified what a row holds that is written
            for one sequence and used by another.
        NotImplementedError: legal, but no kernel serves it (float32 on CUDA, a GPU older than sm_80, a cache or
            an out that is misaligned on CUDA or negated lazily, nested tensors), or an input requires a gradient where
            gradients are enabled.
        RuntimeError: the CUDA runtime failed.

    Example:
        >>> import torch, flashtile
        >>> k_cache, v_cache = torch.zeros(2, 10, 16, 2, 64)                       # 10 pages of 16 rows
        >>> block_table = torch.tensor([[7, 2, 0], [4, 9, 1]], dtype=torch.int32)  # three for each of 2 sequences
        >>> held = torch.tensor([20, 0], dtype=torch.int32)
        >>> q = torch.randn(2, 5, 8, 64)
        >>> k_new, v_new = torch.randn(2, 2, 5, 2, 64)
        >>> out = flashtile.attention_kvcache(
        ...     q, k_cache, v_cache, cache_seqlens=held, k_new=k_new, v_new=v_new, block_table=block_table
        ... )
        >>> out.shape
        torch.Size([2, 5, 8, 64])
        >>> torch.equal(k_cache[2, 4:9], k_new[0])  # rows 20 to 24 of the first sequence
        True
        >>> torch.equal(out[1:], flashtile.attention(q[1:], k_new[1:], v_new[1:], causal=True))
        True
        >>> drafts = flashtile.masks.ColumnMask.tree([-1, 0, 1, 0, -1])  # tokens 1 and 3 follow 0, and 2 follows 1
        >>> out = flashtile.attention_kvcache(
        ...     q, k_cache, v_cache, cache_seqlens=held + 5, block_table=block_table, mask=drafts
        ... )
        >>> torch.equal(out[1:, 4:], flashtile.attention(q[1:, 4:], k_new[1:, 4:], v_new[1:, 4:]))  # token 4 is alone
        True

    Sources: those of :func:`attention`; caches in pages, PagedAttention (Kwon et al. 2023, arXiv:2309.06180); keys in
    parts that fill the GPU, Flash-Decoding (Dao et al. 2023) and Lean Attention (Sanovar et al. 2024,
    arXiv:2405.10480); rotary embedding, RoFormer (Su et al. 2021, arXiv:2104.09864).
    """
    if attn_mask is not ... or is_causal is not ...:
        refuse_misnamed("attention_kvcache", attn_mask)
    operands = (q, k_new, v_new, rotary_cos, rotary_sin)
    floats = (*operands, k_cache, v_cache, alibi_slopes, sinks, k_descale, v_descale)
    if forward_ad._current_level >= 0:
        refuse_tangents("attention_kvcache", **dict(zip(_FLOATS, floats, strict=True)))
    if is_grad_enabled():
        _refuse_gradients(floats)
        if out is not None:
            refuse_gradients_into("attention_kvcache", out)
    if not (type(scale) in PLAIN and type(softcap) in PLAIN):
        refuse_what_learns("attention_kvcache", scale=scale, softcap=softcap)
    if batch_invariant is None:
        batch_invariant = is_batch_invariant()
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = _for_all_sequences(cache_seqlens, q, cu_seqlens_q)
    if sinks is not None:
        sinks = as_float32(sinks)
    tables = (cache_seqlens, block_table, cache_batch_idx, leftpad, cu_seqlens_q, k_descale, v_descale)
    columns = ranges_of("attention_kvcache", mask, q)
    scores = (alibi_slopes, sinks, columns, causal, window, scale, softcap)
    by_operators = is_traced()
    max_logits: Any = None
    if return_max_logits is not False:
        if return_max_logits is not True:
            refuse_flag("attention_kvcache", "return_max_logits", return_max_logits)
        by_operators = by_operators or keeps_bits(q, batch_invariant)
        if not by_operators:
            max_logits = new_max_logits(q, cu_seqlens_q)
    options = (*scores, rotary_interleaved, num_splits, batch_invariant, return_lse, max_logits)
    given = (k_cache, v_cache, operands, tables, options)
    if by_operators:
        out, lse, max_logits = _by_operators(*given, out, return_max_logits)
    else:
        try:
            if profiler._is_profiler_enabled:
                with recorded("attention_kvcache", q, k_cache, v_cache):
                    out, lse = call_kvcache(*given, out)
            else:
                out, lse = call_kvcache(*given, out)
        except (TypeError, RuntimeError):
            refuse_nested("attention_kvcache", q=q, k_cache=k_cache, v_cache=v_cache)
            if not takes_operators(q, k_cache, v_cache):
                raise
            out, lse, max_logits = _by_operators(*given, out, return_max_logits)
    if not return_max_logits:
        return (out, lse) if return_lse else out
    return (out, lse, max_logits) if return_lse else (out, max_logits)


def _by_operators(k_cache, v_cache, operands, tables, options, out, return_max_logits):
    """(out, lse or None, max_logits or None)."""
    q, *others = operands
    if return_max_logits:
        require_room("attention_kvcache", options)
    if return_max_logits and isinstance(q, Tensor):
        operands = (q.clone(), *others)  # it may lie in a cache, and is read again when that has been written
    given = (k_cache, v_cache, operands, tables, options)
    if out is not None:
        require_place_over_cache("attention_kvcache", out, q, k_cache, v_cache, *others[:2])
    out, lse = copied_into(out, kvcache_operator(*given))
    return out, lse, largest_scores_over_cache(*given) if return_max_logits else None


def require_place_over_cache(function, out, q, k_cache, v_cache, k_new, v_new, **read):
    """Refuses what a result over a cache cannot be copied to, before rows are appended."""
    read |= dict(q=q, k_cache=k_cache, v_cache=v_cache)
    read |= {name: x for name, x in dict(k_new=k_new, v_new=v_new).items() if x is not None}
    require_tensors(function, **read)
    require_place(function, out, (*q.shape[:-1], *v_cache.shape[-1:]), q.dtype, q.device, read)


def _for_all_sequences(length, q, cu_seqlens_q):
    """cache_seqlens, of an int."""
    if not (is_compiling() and isinstance(length, int)):  # where a look at the value would tie the graph to it
        length = _checked_length(length)
    if not isinstance(q, Tensor) or q.is_nested or q.layout is not torch.strided:
        return length  # what is wrong with q is said later
    return q.new_full((entries_of(q, cu_seqlens_q),), length, dtype=torch.int32)


def _checked_length(length):
    try:
        length = operator.index(length)
    except TypeError:
        found = _C.described(length)
        message = f"attention_kvcache: cache_seqlens is {found}, expected a torch.Tensor or an int"
        raise TypeError(message) from None
    if not 0 <= length < 2**31:
        found = _C.described(length)
        raise ValueError(f"attention_kvcache: cache_seqlens is {found}, expected an int from 0 to 2^31 - 1")
    return length


def _refuse_gradients(floats):
    for name, x in zip(_FLOATS, floats, strict=True):
        if x is not None and getattr(x, "requires_grad", False):
            raise NotImplementedError(
                f"attention_kvcache: {name} requires grad, expected inputs that do not: there is no backward; "
                "nearest supported: torch.no_grad()"
            )
