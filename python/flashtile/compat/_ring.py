"""What the functions of :mod:`flashtile.compat.ring_flash_attn` have in common: their options, and how they call."""

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..distributed import Layout, attention, attention_varlen
from ..distributed.attention import group_size
from ..varlen import attention_varlen as local_attention_varlen
from ._common import attend, described, flag, new_seed, require_rank, require_table

Result = Tensor | tuple[Tensor, Tensor, None]


class Options(NamedTuple):
    """What all functions take, in their order."""

    dropout_p: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    alibi_slopes: Any
    deterministic: Any
    return_attn_probs: Any
    group: Any


def ring(function, layout, q, k, v, options):
    require_rank(function, 4, "(B, S_local, H, D)", q=q, k=k, v=v)
    group = options.group
    if layout == "zigzag" and group_size(group) > 1:
        for name, x in (("q", q), ("k", k)):
            if x.shape[1] % 2 != 0:
                raise ValueError(f"{function}: {name} has {x.shape[1]} rows, expected an even number: two chunks")
    seed = _common_seed(options.dropout_p, q, group)
    return attend_as_given(function, attention, q, k, v, options, seed=seed, group=group, layout=layout)


def ring_varlen(function, chunks, q, k, v, cu_seqlens, options):
    """`chunks` is how many a rank has of each sequence."""
    require_rank(function, 3, "(T_local, H, D)", q=q, k=k, v=v)
    require_table(function, "(B + 1)", cu_seqlens=cu_seqlens)
    group = options.group
    if group_size(group) == 1:
        tables = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        return attend_as_given(function, local_attention_varlen, q, k, v, options, **tables)
    layout, begins = _divided(function, tuple(cu_seqlens.tolist()), len(q), group_size(group), chunks)
    seed = _common_seed(options.dropout_p, q, group)
    more = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, seed=seed, group=group, layout=layout)
    return attend_as_given(function, attention_varlen, q, k, v, options, **more)


def attend_as_given(function, attention, q, k, v, options, **more):
    return_lse = flag(function, "return_attn_probs", options.return_attn_probs)
    result = attend(
        function,
        attention,
        q,
        k,
        v,
        softmax_scale=options.softmax_scale,
        window_size=options.window_size,
        softcap=0.0,
        deterministic=options.deterministic,
        causal=options.causal,
        alibi_slopes=options.alibi_slopes,
        dropout_p=options.dropout_p,
        return_lse=return_lse,
        **more,
    )
    return (*result, None) if return_lse else result


@lru_cache(maxsize=64)  # all layers of a model ask the same
def _divided(function, begins, rows, ranks, chunks):
    """The layout of sequences of which each rank has as many chunks, and where they begin among all rows. The caller's
    parts begin at `begins`; what it has behind the last, of `rows`, is a sequence of no document."""
    each = list(itertools.pairwise((*begins, rows)))
    if begins[0] != 0 or any(begin > end for begin, end in each):
        expected = f"0 and numbers that never decrease, up to the {rows} rows of q"
        raise ValueError(f"{function}: cu_seqlens is {described(begins)}, expected {expected}")
    if any((end - begin) % chunks for begin, end in each[:-1]):
        raise ValueError(f"{function}: cu_seqlens is {described(begins)}, expected even numbers: two chunks of each")
    runs = [[] for _ in range(ranks)]
    for begin, end in each:
        of_each = chunks if end <= begins[-1] else 1
        size = (end - begin) // of_each
        for rank, own in enumerate(runs):
            for chunk in (rank, 2 * ranks - 1 - rank)[:of_each]:
                own.append((ranks * begin + chunk * size, ranks * begin + (chunk + 1) * size))
    return Layout(tuple(map(tuple, runs))), tuple(ranks * begin for begin in begins)


def _common_seed(dropout_p, like, group):
    """A seed where weights are dropped: the first rank's, but all draw, so that generators stay alike."""
    seed = new_seed(dropout_p)
    if seed is None or group_size(group) == 1:
        return seed
    seed = seed if dist.get_backend(group) == "gloo" else seed.to(like.device)
    dist.broadcast(seed, 0 if group is None else dist.get_process_group_ranks(group)[0], group=group)
    return int(seed)
