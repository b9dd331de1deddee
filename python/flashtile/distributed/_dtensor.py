"""DTensors that are sharded along their sequence, as the tensors of one rank and the group that has the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C


def is_dtensor(x: Any) -> bool:
    """Without loading what PyTorch loads for DTensors, unless there is one."""
    return any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed") for base in type(x).__mro__
    )


def with_local(
    function: str, q: Any, k: Any, v: Any, dim: int, dropout_p: float, call: Callable[..., Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """What `call(q, k, v, group)` returns of the local tensors, as DTensors. Dimension `dim` is the sequence, whose
    shards are its chunks in order. Other dimensions may be sharded as well: each rank computes what it has of them."""
    from torch.distributed.tensor import DTensor, Shard

    found = call(*local_of(function, q, k, v, dim, dropout_p))
    mesh, placements = q.device_mesh, q.placements
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    out, *lse = found if isinstance(found, tuple) else (found,)
    out = DTensor.from_local(out, mesh, placements, run_check=False, shape=shape, stride=_contiguous(shape))
    if not lse:
        return out
    of_lse = [Shard({dim: dim + 1, dim + 1: dim}.get(x.dim, x.dim)) if isinstance(x, Shard) else x for x in placements]
    shape = torch.Size((*q.shape[:dim], q.shape[dim + 1], q.shape[dim]))
    return out, DTensor.from_local(lse[0], mesh, of_lse, run_check=False, shape=shape, stride=_contiguous(shape))


def local_of(function: str, q: Any, k: Any, v: Any, dim: int, dropout_p: float) -> tuple[Tensor, Tensor, Tensor, Any]:
    """The local tensors, and the group whose ranks have the others along dimension `dim`."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, x in ("q", q), ("k", k), ("v", v):
        if not isinstance(x, DTensor):
            raise TypeError(f"{function}: {name} is of type {type(x).__name__}, expected a DTensor, as q")
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            raise ValueError(f"{function}: {name} has placements {x.placements}, expected {q.placements}, as q")
    along = [i for i, placement in enumerate(q.placements) if placement == Shard(dim)]
    others = [x for i, x in enumerate(q.placements) if i not in along and not isinstance(x, Replicate)]
    if len(along) != 1 or any(not isinstance(x, Shard) or x.dim == q.dim() - 1 for x in others):
        raise ValueError(f"{function}: q has placements {q.placements}, expected one Shard({dim}), the sequence")
    if dropout_p and others:
        raise NotImplementedError(
            f"{function}: dropout_p is {_C.described(dropout_p)} and q has placements {q.placements}, expected no "
            "dropout, which counts all entries and heads; nearest supported: tensors sharded along the sequence alone"
        )
    return q.to_local(), k.to_local(), v.to_local(), q.device_mesh.get_group(along[0])


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
