"""Arithmetic on the hidden intervals of a ColumnMask: `ranges`, (B, H, S_k, 4), as that class defines them.

Nothing here waits for the device unless it says so.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

Device = torch.device | str | int | None


def ranges_hiding(seqlen_q: int, *bounds: Tensor | int) -> Tensor:
    """Ranges of begin_0, end_0, begin_1, end_1 for each column, (S_k), (H, S_k) or (B, H, S_k), in any integers."""
    like = next(bound for bound in bounds if isinstance(bound, Tensor))
    tensors = [bound if isinstance(bound, Tensor) else torch.full_like(like, bound) for bound in bounds]
    rows = torch.stack(torch.broadcast_tensors(*tensors), -1).clamp(0, seqlen_q).int()
    intervals = rows.unflatten(-1, (2, 2))
    ranges = (intervals * (intervals[..., :1] < intervals[..., 1:])).flatten(-2)
    return ranges[(None,) * (4 - ranges.dim())]


def ranges_of_runs(where: str, shape: tuple[int, ...], column: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Ranges of hidden intervals in order, whose columns are counted through shape = (B, H, S_k). It waits for the
    device, and raises ValueError, which begins with `where`, for a column that has more than two."""
    columns = shape[0] * shape[1] * shape[2]
    counts = column.bincount(minlength=columns)
    if (counts > 2).any():
        first = int((counts > 2).nonzero()[0])
        head = first // shape[2]
        raise ValueError(
            f"{where}: column {first % shape[2]} of batch entry {head // shape[1]}, head {head % shape[1]} needs "
            f"{int(counts[first])} hidden intervals, expected at most 2"
        )
    rank = torch.arange(len(column), device=column.device) - (counts.cumsum(0) - counts)[column]
    ranges = torch.zeros(columns, 2, 2, dtype=torch.int32, device=column.device)
    ranges[column, rank] = torch.stack([begin, end], -1).int()
    return ranges.reshape(*shape, 4)


def kinds_of_blocks(
    ranges: Tensor,
    seqlen_q: int,
    tile_m: int,
    tile_n: int,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> tuple[int, int, int]:
    """How many blocks of tile_n columns are interior, at an edge or skipped, over the tiles of tile_m rows of all
    masks, where a band hides rows as well. It waits for the device."""
    columns = ranges.shape[2]
    far = columns + seqlen_q  # beyond any distance: what a tensor of integers might not hold
    left, right = (None if n is None else min(max(operator.index(n), -far), far) for n in window or (None, None))
    if causal:
        right = 0 if right is None else min(right, 0)
    diagonal = torch.arange(columns, device=ranges.device) - (columns - seqlen_q)  # which row each column meets there
    first = diagonal * 0 if right is None else (diagonal - right).clamp(0, seqlen_q)
    end = diagonal * 0 + seqlen_q if left is None else (diagonal + left + 1).clamp(0, seqlen_q)
    interior = shown = tiles = 0
    for row in range(0, seqlen_q, tile_m):
        begin, stop = first.clamp(min=row), end.clamp(max=min(row + tile_m, seqlen_q))
        hidden = hidden_before(stop.maximum(begin), ranges) - hidden_before(begin, ranges)  # (B, H, S_k)
        seen = torch.nn.functional.pad((stop - begin).clamp(min=0) - hidden, (0, -columns % tile_n))
        of_blocks = seen.unflatten(-1, (-1, tile_n)).sum(-1)
        shown += int((of_blocks > 0).sum())
        interior += int((of_blocks == tile_n * (min(row + tile_m, seqlen_q) - row)).sum())
        tiles += of_blocks.numel()
    return interior, shown - interior, tiles - shown


def hidden_before(rows: Tensor, ranges: Tensor) -> Tensor:
    """How many of the first `rows` rows are hidden from each column, int64."""
    begin_0, end_0, begin_1, end_1 = ranges.long().clamp(min=0).unbind(-1)

    def within(begin: Tensor, end: Tensor) -> Tensor:
        return (rows.minimum(end) - begin).clamp(min=0)

    return within(begin_0, end_0) + within(begin_1, end_1) - within(begin_0.maximum(begin_1), end_0.minimum(end_1))


def edges_of_cells(length: int, size: int) -> Tensor:
    """Of `size` cells, or as many as there are elements, of sizes that differ by 1 at most."""
    cells = min(length, size)
    return torch.arange(cells + 1) * length // max(cells, 1)


def arange(count: int, device: Device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def spread(values: Sequence[int], lengths: Sequence[int], device: Device) -> Tensor:
    """Each value as often as its length says, without waiting for the device."""
    given = torch.tensor([values, lengths], dtype=torch.int32).to(device)
    return given[0].repeat_interleave(given[1], output_size=sum(lengths))
