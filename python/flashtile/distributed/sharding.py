"""Tensors of a whole sequence, and the rows of them that a rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._exchange import Group
from .attention import group_size
from .layout import Layout


def shard(x: Tensor, dim: int, group: Any = None, layout: str | Layout = "zigzag") -> Tensor:
    """The caller's rows of `x`, which all ranks have, along dimension `dim`, one behind the other."""
    if group_size(group) == 1:
        return x
    ranks = Group(group)
    runs = layout_of(layout, x.shape[dim], ranks).runs[ranks.rank]
    return torch.cat([x.narrow(dim, 0, 0), *(x.narrow(dim, begin, end - begin) for begin, end in runs)], dim)


def positions(length: int, group: Any = None, layout: str | Layout = "zigzag", device: Any = None) -> Tensor:
    """Where the caller's rows lie in a sequence of `length` rows, int64: for rotary embedding."""
    if group_size(group) == 1:
        return torch.arange(length, device=device)
    ranks = Group(group)
    return layout_of(layout, length, ranks).positions(ranks.rank).to(device)


def unshard(x: Tensor, dim: int, group: Any = None, layout: str | Layout = "zigzag") -> Tensor:
    """The way back of :func:`shard`: the whole tensor, on all ranks."""
    if group_size(group) == 1:
        return x
    ranks = Group(group)
    counts: list[Any] = [None] * ranks.size
    dist.all_gather_object(counts, x.shape[dim], group=group)
    found = layout_of(layout, sum(counts), ranks)
    mine = x.movedim(dim, 0).contiguous()
    whole = mine.new_empty(found.length, *mine.shape[1:])
    first, own = 0, []
    for begin, end in found.runs[ranks.rank]:
        own.append(mine[first : first + end - begin])
        first += end - begin
    places = {rank: [whole[begin:end] for begin, end in found.runs[rank]] for rank in range(ranks.size)}
    ranks.exchange(dict.fromkeys(places, own), places).wait()
    return whole.movedim(0, dim)


def layout_of(layout: str | Layout, length: int, group: Group) -> Layout:
    return Layout.of(layout, length, group.size) if isinstance(layout, str) else layout
