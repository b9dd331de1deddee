"""Masks of row intervals: for each key column, the query rows that are hidden from it, as at most two intervals.

This is FlashMask's representation (Wang et al. 2024, arXiv:2410.01359): packed documents, shared questions, prefixes,
blocks of images, evicted keys and trees of drafts need no more, and a mask takes memory for its columns alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._mask_arguments import checked_size, require_int32
from ._mask_intervals import Device, arange, edges_of_cells, hidden_before
from ._mask_kinds import MaskKinds

__all__ = ["ColumnMask"]


@dataclass(frozen=True, eq=False, repr=False)
class ColumnMask(MaskKinds):
    """Which query rows each key column is hidden from, as two half-open intervals of rows for each column.

    Column j of batch entry b and head h is hidden from row i where, with r = ranges[b, h, j]::

        r[0] ≤ i < r[1]  or  r[2] ≤ i < r[3]

    Rows are counted from 0 at the first query of their sequence, whatever S_k is: they are not aligned on the diagonal,
    and the mask is complete in itself. An interval that is not used is (0, 0). The two may overlap, in any order.

    Values are data of the device, which no call reads on the host. Kernels take them literally, so an interval whose
    end is not above its begin hides nothing, rows that do not exist are hidden in vain, and nothing is read out of
    bounds whatever they are. :meth:`check` says where they are wrong.

    Args:
        ranges: int32, (B or 1, H, S_k, 4), H being 1, H_k or H_q. Copied unless its last two dimensions are contiguous.
        seqlen_q: S_q, or None where the mask is of a ragged batch.
        cu_seqlens: of a ragged batch, what `attention_varlen` takes as cu_seqlens_q and cu_seqlens_k: int32, (B + 1)
            each. Then ranges are (1, H, T_k, 4), the columns of all sequences one behind the other, and rows are
            counted within a sequence. :meth:`concatenate` makes such masks.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices break the rules above.

    Example:
        >>> from flashtile.masks import ColumnMask
        >>> mask = ColumnMask.causal_document([2, 4])
        >>> mask
        ColumnMask(B=1, H=1, S_q=6, S_k=6, device=cpu)
        >>> mask.ranges[0, 0, 1].tolist()  # column 1 is hidden from row 0 and from rows 2, 3, 4 and 5
        [0, 1, 2, 6]
        >>> print(mask.picture())
        #.....
        ##....
        ..#...
        ..##..
        ..###.
        ..####
    """

    ranges: Tensor
    seqlen_q: int | None
    cu_seqlens: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        require_int32("ColumnMask: ranges", self.ranges)
        shape = tuple(self.ranges.shape)
        if len(shape) != 4 or shape[3] != 4:
            raise ValueError(f"ColumnMask: ranges has shape {shape}, expected (B, H, S_k, 4)")
        if self.cu_seqlens is None:
            checked_size("ColumnMask: seqlen_q", self.seqlen_q)
        else:
            self._check_ragged(shape, self.cu_seqlens)
        if not self._is_readable():
            object.__setattr__(self, "ranges", self.ranges.clone(memory_format=torch.contiguous_format))

    def _is_readable(self) -> bool:
        """Whether kernels can read the four numbers of a column at once. A compiler knows no storage_offset."""
        if torch.compiler.is_dynamo_compiling():
            return False
        *outer, column, row = self.ranges.stride()
        return (column, row) == (4, 1) and not any(stride % 4 for stride in (*outer, self.ranges.storage_offset()))

    def _check_ragged(self, shape: tuple[int, ...], cu_seqlens: tuple[Tensor, Tensor]) -> None:
        if self.seqlen_q is not None:
            raise ValueError(f"ColumnMask: seqlen_q is {self.seqlen_q}, expected None, as cu_seqlens are given")
        if not isinstance(cu_seqlens, tuple) or len(cu_seqlens) != 2:
            raise TypeError(f"ColumnMask: cu_seqlens is {cu_seqlens!r}, expected the pair (cu_seqlens_q, cu_seqlens_k)")
        if shape[0] != 1:
            raise ValueError(f"ColumnMask: ranges has shape {shape}, expected (1, H, T_k, 4), as cu_seqlens are given")
        for name, offsets in zip(("cu_seqlens[0]", "cu_seqlens[1]"), cu_seqlens, strict=True):
            require_int32(f"ColumnMask: {name}", offsets)
            if offsets.dim() != 1 or offsets.shape != cu_seqlens[0].shape or not len(offsets):
                raise ValueError(f"ColumnMask: {name} has shape {tuple(offsets.shape)}, expected (B + 1), as the other")
            if offsets.device != self.ranges.device:
                raise ValueError(f"ColumnMask: {name} is on {offsets.device}, expected {self.ranges.device}")

    def __repr__(self) -> str:
        batch, heads, columns, _ = self.ranges.shape
        if self.cu_seqlens is not None:
            sizes = f"B={len(self.cu_seqlens[0]) - 1}, H={heads}, T_k={columns}"
        else:
            sizes = f"B={batch}, H={heads}, S_q={self.seqlen_q}, S_k={columns}"
        return f"ColumnMask({sizes}, device={self.device})"

    @property
    def device(self) -> torch.device:
        return self.ranges.device

    def to(self, device: Device, *, non_blocking: bool = False) -> ColumnMask:
        """This mask on a device."""

        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        cu_seqlens = self.cu_seqlens and (moved(self.cu_seqlens[0]), moved(self.cu_seqlens[1]))
        return ColumnMask(moved(self.ranges), self.seqlen_q, cu_seqlens)

    # What a mask says of itself. Of these, all but to_dense wait for the device.

    def check(self) -> None:
        """Reads the values. Raises ValueError unless 0 ≤ begin ≤ end ≤ S_q for each interval, naming the first that
        does not comply."""
        begin, end = self.ranges[..., 0::2], self.ranges[..., 1::2]  # (B, H, S_k, interval)
        rows = self._rows_of_columns()
        wrong = (begin < 0) | (begin > end) | (end > rows[:, None])
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            batch, head, column, interval = place
            raise ValueError(
                f"ColumnMask.check: interval {interval} of column {column} of batch entry {batch}, head {head} is "
                f"({begin[place]}, {end[place]}), expected 0 ≤ begin ≤ end ≤ S_q = {rows[column]}"
            )

    def to_dense(self, batch: int | None = None) -> Tensor:
        """The mask written out: bool, (B, H, S_q, S_k), True where a row sees a column. With `batch`, B is that."""
        seqlen_q = self._seqlen_q("to_dense")
        row = arange(seqlen_q, self.device)[:, None]  # (S_q, 1)
        begin_0, end_0, begin_1, end_1 = self.ranges.unsqueeze(2).unbind(-1)  # (B, H, 1, S_k)
        visible = ~(((begin_0 <= row) & (row < end_0)) | ((begin_1 <= row) & (row < end_1)))
        return visible if batch is None else visible.expand(batch, -1, -1, -1)

    def sparsity(self) -> float:
        """The share of elements that are hidden, from 0 to 1, without writing the mask out; 0 where there are none."""
        rows = self._rows_of_columns()
        elements = self.ranges.shape[0] * self.ranges.shape[1] * int(rows.sum())
        return int(hidden_before(rows, self.ranges).sum()) / max(elements, 1)

    def picture(self, batch: int = 0, head: int = 0, size: int = 64) -> str:
        """The mask as text: # is visible, . hidden. Where it has more than `size` rows or columns, a character stands
        for several elements, and + for both kinds."""
        shares = self._shares("picture", batch, head, size).tolist()
        return "\n".join("".join("#" if x == 1 else "." if x == 0 else "+" for x in row) for row in shares)

    def plot(self, where: Any, batch: int = 0, head: int = 0, size: int = 512) -> Any:
        """Draws the mask with matplotlib, to a file if `where` is a path, else into these axes, which it returns.

        Where it has more than `size` rows or columns, a cell is as dark as the share of its elements that is visible.
        Raises ImportError where there is no matplotlib: pip install 'flashtile[plot]'.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.colors import LinearSegmentedColormap
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("ColumnMask.plot draws with matplotlib: pip install 'flashtile[plot]'") from None
        shares, axes = self._shares("plot", batch, head, size), where
        if isinstance(where, str | Path):
            figure = Figure(figsize=(5, 5), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
        colours = LinearSegmentedColormap.from_list("visible", ["#eeeeee", "#d55e00"])
        extent = (0, self.ranges.shape[2], self._seqlen_q("plot"), 0)
        axes.imshow(shares.numpy(), cmap=colours, vmin=0, vmax=1, extent=extent, interpolation="nearest")
        axes.set(xlabel="key column", ylabel="query row")
        axes.set_title(f"{self.sparsity():.1%} hidden", loc="left")
        if axes is not where:
            axes.figure.savefig(where)
        return axes

    def _seqlen_q(self, method: str) -> int:
        if self.seqlen_q is None:
            raise ValueError(f"ColumnMask.{method}: the mask is of a ragged batch, expected one of its split()")
        return self.seqlen_q

    def _rows_of_columns(self) -> Tensor:
        """How many rows each column has, (S_k) or (T_k)."""
        columns = self.ranges.shape[2]
        if self.cu_seqlens is None:
            return torch.full((columns,), self._seqlen_q("sparsity"), device=self.device)
        rows, lengths = (offsets.diff() for offsets in self.cu_seqlens)
        rows = rows.repeat_interleave(lengths)
        return torch.nn.functional.pad(rows, (0, columns - len(rows)))  # columns behind the last sequence have none

    def _shares(self, method: str, batch: int, head: int, size: int) -> Tensor:
        """Which share of each cell is visible, of at most (size, size) cells, float64 on the CPU."""
        seqlen_q, ranges = self._seqlen_q(method), self.ranges[batch, head].cpu()  # (S_k, 4)
        height, width = (edges_of_cells(length, size) for length in (seqlen_q, len(ranges)))
        cells = []
        for begin, end in itertools.pairwise(width.tolist()):
            hidden = hidden_before(height[:, None], ranges[begin:end]).sum(1).diff().double()
            cells.append(1 - hidden / (height.diff() * (end - begin)))
        return torch.stack(cells, 1) if cells else torch.empty(len(height) - 1, 0)

    # Several masks as one.

    @classmethod
    def stack(cls, masks: Sequence[ColumnMask]) -> ColumnMask:
        """The mask of a batch, of which each entry has one of these, of equal sizes.

        >>> ColumnMask.stack([ColumnMask.causal_document([2, 4]), ColumnMask.causal_document([6])])
        ColumnMask(B=2, H=1, S_q=6, S_k=6, device=cpu)
        """
        seqlens_q = [mask._seqlen_q("stack") for mask in _alike("stack", masks, dims=(0, 1, 2))]
        for i, seqlen_q in enumerate(seqlens_q):
            if seqlen_q != seqlens_q[0]:
                raise ValueError(f"ColumnMask.stack: masks[{i}] has S_q = {seqlen_q}, expected {seqlens_q[0]}")
        return cls(torch.cat([mask.ranges for mask in masks]), seqlens_q[0])

    @classmethod
    def concatenate(cls, masks: Sequence[ColumnMask]) -> ColumnMask:
        """The mask of a ragged batch, of which each sequence has one of these; each is of B = 1, and of as many heads.

        >>> ColumnMask.concatenate([ColumnMask.causal(3, 3), ColumnMask.full(2, 5)])
        ColumnMask(B=2, H=1, T_k=8, device=cpu)
        """
        seqlens_q = [mask._seqlen_q("concatenate") for mask in _alike("concatenate", masks, dims=(0, 1))]
        if len(masks[0].ranges) != 1:
            raise ValueError(f"ColumnMask.concatenate: masks[0] has B = {len(masks[0].ranges)}, expected 1")
        lengths = seqlens_q, [mask.ranges.shape[2] for mask in masks]
        offsets = torch.tensor([[0, *itertools.accumulate(of)] for of in lengths], dtype=torch.int32)
        cu_seqlens_q, cu_seqlens_k = offsets.to(masks[0].device)
        return cls(torch.cat([mask.ranges for mask in masks], 2), None, (cu_seqlens_q, cu_seqlens_k))

    def split(self) -> list[ColumnMask]:
        """The masks of the sequences of a ragged batch."""
        if self.cu_seqlens is None:
            raise ValueError("ColumnMask.split: the mask is of no ragged batch, expected one that concatenate() made")
        rows, columns = (offsets.diff().tolist() for offsets in self.cu_seqlens)
        begins = self.cu_seqlens[1].tolist()
        return [
            ColumnMask(self.ranges[:, :, begin : begin + length], seqlen_q)
            for begin, length, seqlen_q in zip(begins, columns, rows, strict=False)
        ]


def ranges_of(function: str, mask: Any, q: Any, cu_seqlens: Any = None, *, ragged: bool = False) -> Tensor | None:
    """What kernels read of the mask that `function` is given beside q, of a ragged batch with the cu_seqlens of q. The
    compiled module looks at what it reads."""
    if mask is None:
        return None
    if not isinstance(mask, ColumnMask):
        raise TypeError(f"{function}: mask is {_C.described(mask)}, expected a flashtile.masks.ColumnMask or None")
    if ragged and mask.cu_seqlens is None:
        raise ValueError(f"{function}: mask is {mask}, expected one of a ragged batch, which concatenate() makes")
    if mask.cu_seqlens is not None and isinstance(cu_seqlens, Tensor) and cu_seqlens.shape != mask.cu_seqlens[0].shape:
        found = f"expected one of as many sequences as cu_seqlens_q, of shape {tuple(cu_seqlens.shape)} = (B + 1)"
        raise ValueError(f"{function}: mask is {mask}, {found}")
    if not ragged and mask.cu_seqlens is not None:
        raise ValueError(f"{function}: mask is {mask}, expected one of equally long sequences")
    if not ragged and isinstance(q, Tensor) and q.dim() == 4 and mask.seqlen_q != q.shape[1]:
        raise ValueError(f"{function}: mask has S_q = {mask.seqlen_q}, expected {q.shape[1]}, as q")
    return mask.ranges


def _alike(method: str, masks: Sequence[ColumnMask], dims: tuple[int, ...]) -> Sequence[ColumnMask]:
    """Masks whose ranges agree in these dimensions and in the device."""
    where = f"ColumnMask.{method}: masks"
    if not masks:
        raise ValueError(f"{where} is empty, expected at least one")
    for i, mask in enumerate(masks):
        if not isinstance(mask, ColumnMask):
            raise TypeError(f"{where}[{i}] is of type {type(mask).__name__}, expected a ColumnMask")
        for dim in dims:
            found, expected = mask.ranges.shape[dim], masks[0].ranges.shape[dim]
            if found != expected:
                raise ValueError(f"{where}[{i}] has {('B', 'H', 'S_k')[dim]} = {found}, expected {expected}")
        if mask.device != masks[0].device:
            raise ValueError(f"{where}[{i}] is on {mask.device}, expected {masks[0].device}")
    return masks
