"""Tensors of a whole sequence, and the rows of them that a rank has."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._ops import differentiable_once
from ._exchange import Group
from .attention import group_size
from .layout import Layout, Runs, layout_of, require_rows


def shard(x: Tensor, dim: int, group: Any = None, layout: str | Layout = "zigzag") -> Tensor:
    """The caller's rows of `x`, which all ranks have, along dimension `dim`, one behind the other.

    Raises:
        IndexError: `x` has no such dimension.
        ValueError: `layout` is of another number of ranks, or of rows.
    """
    dim = _dimension("shard", x, dim)
    if group_size(group) == 1:
        return x
    ranks = Group(group)
    return _rows_of(x, dim, layout_of("shard", layout, x.shape[dim], ranks.size).runs[ranks.rank])


def positions(length: int, group: Any = None, layout: str | Layout = "zigzag", device: Any = None) -> Tensor:
    """Where the caller's rows lie in a sequence of `length` rows, int64: for rotary embedding.

    Raises:
        ValueError: `layout` is of another number of ranks, or of rows.
    """
    if group_size(group) == 1:
        return torch.arange(length, device=device)
    ranks = Group(group)
    return layout_of("positions", layout, length, ranks.size).positions(ranks.rank).to(device)


def unshard(x: Tensor, dim: int, group: Any = None, layout: str | Layout = "zigzag") -> Tensor:
    """The way back of :func:`shard`: the whole tensor, on all ranks.

    Differentiable, where all ranks compute the same from the whole: the gradient of `x` is the caller's rows of that of
    the whole.

    Raises, on all ranks:
        IndexError: `x` has no such dimension.
        ValueError: ranks have other dtypes, sizes of the other dimensions, or numbers of rows than the layout says.
    """
    if group_size(group) == 1:
        _dimension("unshard", x, dim)
        return x
    ranks, failure = Group(group), None
    mine: dict[str, Any] = {}
    try:
        dim = _dimension("unshard", x, dim)
        mine = {"dtype": str(x.dtype), "sizes beside the rows": (*x.shape[:dim], *x.shape[dim + 1 :])}
        mine |= {"the dimension": dim, "the layout": str(layout)}
    except Exception as found_wrong:
        failure = found_wrong
    theirs: list[Any] = [None] * ranks.size
    dist.all_gather_object(theirs, (mine, x.shape[dim] if mine else str(failure)), group=ranks.group)
    if failure is not None:
        raise failure
    for rank, (other, refusal) in enumerate(theirs):
        if not other:
            raise ValueError(f"unshard: rank {rank} refuses its arguments: {refusal}")
    for rank, (other, _) in enumerate(theirs):
        for name, expected in theirs[0][0].items():
            if other[name] != expected:
                raise ValueError(f"unshard: {name} is {other[name]} on rank {rank}, expected {expected}, as on rank 0")
    counts = [count for _, count in theirs]
    found = layout_of("unshard", layout, sum(counts), ranks.size)
    require_rows("unshard", "x", found, counts)
    whole: Tensor = _Unshard.apply(x.movedim(dim, 0), ranks, found)
    return whole.movedim(0, dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Group, layout: Layout) -> Tensor:
        ctx.runs = layout.runs[ranks.rank]
        mine = x.contiguous()
        whole = mine.new_empty(layout.length, *mine.shape[1:])
        first, own = 0, []
        for begin, end in ctx.runs:
            own.append(mine[first : first + end - begin])
            first += end - begin
        places = {rank: [whole[begin:end] for begin, end in layout.runs[rank]] for rank in range(ranks.size)}
        ranks.exchange(dict.fromkeys(places, own), places).wait()
        return whole

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor | None, ...]:
        # A second derivative would need what the other ranks made of the whole.
        compute = _gradient_with_graph if torch.is_grad_enabled() else _gradient
        return (*compute(dwhole, ctx.runs), None, None)


def _gradient(dwhole: Tensor, runs: Runs) -> tuple[Tensor]:
    return (_rows_of(dwhole, 0, runs),)


_gradient_with_graph = differentiable_once(_gradient)


def _rows_of(x: Tensor, dim: int, runs: Runs) -> Tensor:
    return torch.cat([x.narrow(dim, 0, 0), *(x.narrow(dim, begin, end - begin) for begin, end in runs)], dim)


def _dimension(function: str, x: Tensor, dim: int) -> int:
    """`dim`, counted from the first dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{function}: x is of type {type(x).__name__}, expected a torch.Tensor")
    dim = operator.index(dim)
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{function}: dim is {dim}, expected a dimension of x, which has {x.dim()}")
    return dim % x.dim()
