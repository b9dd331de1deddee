"""Ragged batches, where flash-attn has ones that are dense on a side, or in chunks."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._core import check_begins, has_memory
from .._padding import require_values, visible_first
from ..varlen import attention_varlen
from ._chunks import in_chunks
from ._common import attend, require_descales, require_rank, written


def attend_ragged(
    function,
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    *,
    seqused_q=None,
    seqused_k=None,
    attention_chunk=0,
    return_lse=False,
    out=None,
    **options,
):
    """``flashtile.attention_varlen``. A side without cu_seqlens is dense, (B, S, H, D), and so are the results where it
    is that of q; with `attention_chunk` a query sees keys of its own chunk only."""
    dense_q = None
    if cu_seqlens_q is None:
        require_rank(function, 4, "(B, S_q, H_q, D), since cu_seqlens_q is None", q=q)
        dense_q, q, cu_seqlens_q = q.shape[:2], q.flatten(0, 1), equal_lengths(q)
    if cu_seqlens_k is None:
        require_rank(function, 4, "(B, S_k, H_k, D), since cu_seqlens_k is None", k=k, v=v)
        require_values(function, k, v)
        k, v, cu_seqlens_k = k.flatten(0, 1), v.flatten(0, 1), equal_lengths(k)
    tables = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k)
    if attention_chunk > 0:
        require_rank(function, 3, "(T, H, D)", q=q, k=k, v=v)
        names = ("q_descale", "k_descale", "v_descale")
        descales = {name: options.pop(name) for name in names if options.get(name) is not None}
        no_head = options | {name: None for name in ("alibi_slopes", "sinks") if name in options}
        with torch.no_grad():  # flashtile says what is wrong with these tables, for no head
            attend(function, attention_varlen, q[..., :0, :], k[..., :1, :], v[..., :1, :], **tables, **no_head)
        require_descales(function, (cu_seqlens_q.shape[0] - 1, k.shape[1]), q.device, **descales)
        tables = in_chunks(attention_chunk, q.shape[0], **tables, **descales)
    options |= tables | dict(return_lse=return_lse)
    if dense_q is None:
        return attend(function, attention_varlen, q, k, v, out=out, **options)
    result = dense_results(attend(function, attention_varlen, q, k, v, **options), dense_q)
    return written(function, "out", out, result, q=q, k=k, v=v)


def dense_results(result, sizes):
    """Out, or (out, lse), of (T, H, D_v) and (H, T) as (B, S, H, D_v) and (B, H, S); `sizes` are (B, S)."""
    if isinstance(result, Tensor):
        return result.unflatten(0, sizes)
    out, lse = result
    return out.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1).contiguous()


def check_lengths(function, rows, rows_name, **tables):
    """What tables hold is checked on the CPU alone, where they are not handed on to flashtile, which does the same:
    first cu_seqlens of so many `rows`, then numbers of rows of each sequence, none above those of the table before."""
    if not has_memory(*tables.values()) or not all(x.is_cpu for x in tables.values()):
        return
    (name, begins), *others = tables.items()
    check_begins(function, name, begins, rows, rows_name)
    most, what = begins.diff(), "the sequence's length"
    for name, table in others:
        wrong = (table < 0) | (table > most)
        if wrong.any():
            i = int(wrong.int().argmax())
            found, limit = int(table[i]), int(most[i])
            raise ValueError(f"{function}: {name} has {found} at index {i}, expected from 0 to {what} {limit}")
        most, what = table, name


def those_first(total, cu_seqlens, skipped, used):
    """Rows of which `used` (B) count, behind `skipped` (B) of each sequence, or None for all the rest, or for none: the
    order (`total`) that has these in front, one sequence behind the other, and where each sequence begins then,
    (B + 1). What is used of a sequence ends with it."""
    begins = cu_seqlens[:-1] if skipped is None else cu_seqlens[:-1] + skipped
    rest = (cu_seqlens[1:] - begins).clamp(min=0)
    used = rest if used is None else used.clamp(min=0).minimum(rest)
    row = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    # There is one sequence more here, with the rows behind the last one, none of which count.
    counts = (row >= pad(begins, (0, 1))[sequence]) & (row < pad(begins + used, (0, 1))[sequence])
    return visible_first(counts[None])[0][0], pad(used.cumsum(0, dtype=torch.int32), (1, 0))


def equal_lengths(x):
    """cu_seqlens of a dense `x`, (B, S, ...)."""
    batch, seqlen = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen
