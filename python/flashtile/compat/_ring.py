"""What the functions of :mod:`flashtile.compat.ring_flash_attn` have in common: their options, and how they call."""

import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import Layout, attention, attention_varlen
from ..distributed._agree import agree
from ..distributed._exchange import Group
from ..distributed.attention import group_size
from ..varlen import attention_varlen as local_attention_varlen
from ._common import attend, described, flag, new_seed, require_rank, require_table, unpacked

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


def ring(function, layout, operands, options):
    """`operands` are q, k and v, or q and kv, or qkv."""
    with refusing_together(function, operands, options, _common_seed) as seeded:
        q, k, v = unpacked_of(function, "B, S_local", operands)
        require_rank(function, 4, "(B, S_local, H, D)", q=q, k=k, v=v)
        if layout == "zigzag" and group_size(options.group) > 1:
            for name, x in (("q", q), ("k", k)):
                if x.shape[1] % 2 != 0:
                    raise ValueError(f"{function}: {name} has {x.shape[1]} rows, expected an even number: two chunks")
        more = dict(group=options.group, layout=layout)
        return attend_as_given(function, seeded(attention), q, k, v, options, **more)


def ring_varlen(function, chunks, operands, cu_seqlens, options):
    """`chunks` is how many a rank has of each sequence; `operands` are those of ring()."""
    with refusing_together(function, operands, options, _common_seed) as seeded:
        q, k, v = unpacked_of(function, "T_local", operands)
        require_rank(function, 3, "(T_local, H, D)", q=q, k=k, v=v)
        require_table(function, "(B + 1)", cu_seqlens=cu_seqlens)
        ranks = group_size(options.group)
        if ranks == 1:
            tables = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
            return attend_as_given(function, local_attention_varlen, q, k, v, options, **tables)
        layout, begins = _divided(function, tuple(cu_seqlens.tolist()), len(q), ranks, chunks)
        more = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, group=options.group, layout=layout)
        return attend_as_given(function, seeded(attention_varlen), q, k, v, options, **more)


def unpacked_of(function, rows, operands):
    """q, k and v of operands whose rows are (B, S_local) or (T_local)."""
    *before, packed = operands
    if len(operands) == 3:
        return operands
    name, size = ("kv", 2) if before else ("qkv", 3)
    return (*before, *unpacked(function, name, packed, f"({rows}, {size}, {'H_k' if before else 'H'}, D)"))


@contextlib.contextmanager
def refusing_together(function, operands, options, seed_for):
    """Gives a function that makes another, which sees to it that all ranks raise where any refuses its arguments, one
    with a seed. What a rank refuses before it gets there it tells the others here, which would wait for it.

    `seed_for` is asked for a seed of (dropout_p, device, group), on all ranks once for each call."""
    group, begun = options.group, False
    size = group_size(group)
    seed = functools.partial(seed_for, options.dropout_p, _device_of(operands), group)

    def seeded(attention):
        def call(*args, **more):
            nonlocal begun
            begun = True
            return attention(*args, seed=seed(), **more)

        return call

    try:
        yield seeded
    except Exception as refusal:
        if size > 1 and not begun:
            seed()  # for which the others wait first
            on_cpu = not any(getattr(x, "is_cuda", False) for x in operands)
            agree(function, Group(group), (0, 0), {}, refusal, on_cpu=on_cpu)
        raise


def _device_of(operands):
    return next((x.device for x in operands if isinstance(x, Tensor)), torch.device("cpu"))


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


@functools.lru_cache(maxsize=64)  # all layers of a model ask the same
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


def _common_seed(dropout_p, device, group):
    """A seed where weights are dropped: the first rank's, but all draw, so that generators stay alike."""
    seed = new_seed(dropout_p)
    if seed is None or group_size(group) == 1:
        return seed
    seed = seed if dist.get_backend(group) == "gloo" else seed.to(device)
    dist.broadcast(seed, 0 if group is None else dist.get_process_group_ranks(group)[0], group=group)
    return int(seed)
