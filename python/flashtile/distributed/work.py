"""How much each row of a sequence has to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import Window
from ..masks import ColumnMask
from ._pairs import Band


def work_of_rows(
    length: int,
    *,
    causal: bool = False,
    window: Window = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    mask: ColumnMask | None = None,
) -> Tensor:
    """How many keys each row sees, for :meth:`Layout.balanced`; with a mask whose heads or entries differ, their mean.

    Args:
        length: of the sequence, or how many rows those of a ragged batch have together.
        causal: as attention takes it, as the next.
        window: (left, right).
        cu_seqlens: where the sequences of a ragged batch begin, and where the last one ends.
        mask: of the whole sequence or batch.

    Returns:
        (length), float64, on the CPU. The mask's values are read, which waits for its device.

    >>> work_of_rows(5, causal=True).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0]
    >>> work_of_rows(5, causal=True, cu_seqlens=(0, 2, 5)).tolist()
    [1.0, 2.0, 1.0, 2.0, 3.0]
    """
    begins = [0, length] if cu_seqlens is None else list(map(int, cu_seqlens))
    keys = torch.arange(begins[-1])
    lengths = torch.tensor(begins).diff()
    begin, end = (torch.tensor(x).repeat_interleave(lengths) for x in (begins[:-1], begins[1:]))
    before, after = Band.of(causal, window).rows((0, 1))
    first, last = (keys + before).maximum(begin), (keys + after).minimum(end)  # the rows that see a key
    seen = _rows_between(first, last, length)
    if mask is None:
        return seen
    ranges = mask.ranges.cpu().long()[:, :, : len(keys)] + begin[:, None]
    begin_0, end_0, begin_1, end_1 = (x.clamp(first, last.maximum(first)) for x in ranges.unbind(-1))
    both = begin_0.maximum(begin_1), end_0.minimum(end_1)
    masks = ranges.shape[0] * ranges.shape[1]
    hidden = _rows_between(begin_0, end_0, length) + _rows_between(begin_1, end_1, length)
    return seen - (hidden - _rows_between(*both, length)) / masks


def _rows_between(begin: Tensor, end: Tensor, length: int) -> Tensor:
    """For each row how many of the intervals have it."""
    begin, end = begin.flatten(), end.flatten()
    there = begin < end
    steps = torch.zeros(length + 1, dtype=torch.float64)
    ones = torch.ones(int(there.sum()), dtype=torch.float64)
    steps.index_add_(0, begin[there], ones).index_add_(0, end[there], -ones)
    return steps.cumsum(0)[:-1]
