"""Masks of row intervals: for each key column, the query rows that are hidden from it, as at most two intervals.

This is FlashMask's representation (Wang et al. 2024, arXiv:2410.01359): packed documents, shared questions, prefixes,
blocks of images, evicted keys and trees of drafts need no more, and a mask takes memory for its columns alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._mask_arguments import (
    Lengths,
    Spans,
    checked_size,
    checked_sizes,
    checked_spans,
    require_int32,
    require_tensor,
    spans_and_gaps,
)
from ._mask_intervals import Device, arange, edges_of_cells, hidden_before, ranges_hiding, ranges_of_runs, spread

__all__ = ["ColumnMask"]


@dataclass(frozen=True, eq=False, repr=False)
class ColumnMask:
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

    # Masks in other representations.

    @classmethod
    def from_startend_row_indices(cls, indices: Tensor, causal: bool, seqlen_q: int | None = None) -> ColumnMask:
        """FlashMask's tensor: int32, (B or 1, H, S_k, n), of hidden rows. It stays on its device, and is not read.

        ====== = ==================================== =====================================================
        causal n hidden from column j                 in the last dimension
        ====== = ==================================== =====================================================
        True   1 rows ≥ LTS, right of the diagonal    LTS, the lower triangle's start
        True   2 [LTS, LTE), right of the diagonal    LTS, LTE, its end
        False  2 rows ≥ LTS, rows < UTE               LTS, UTE, the upper triangle's end
        False  4 [LTS, LTE), [UTS, UTE)               LTS, LTE, UTS, UTE
        ====== = ==================================== =====================================================

        The diagonal is at the bottom right as everywhere: right of it are rows below j - (S_k - S_q), and with
        causal=True the mask hides them itself. S_q is S_k unless given. Rows that do not exist are cut off.

        >>> indices = torch.tensor([4, 4, 3, 6, 6, 6], dtype=torch.int32)[None, None, :, None]
        >>> print(ColumnMask.from_startend_row_indices(indices, causal=True).picture())
        #.....
        ##....
        ###...
        ##.#..
        ...##.
        ...###
        """
        where = "ColumnMask.from_startend_row_indices"
        require_int32(f"{where}: indices", indices)
        if not isinstance(causal, bool):
            raise TypeError(f"{where}: causal is {causal!r}, expected True or False")
        shape, counts = tuple(indices.shape), (1, 2) if causal else (2, 4)
        if len(shape) != 4 or shape[3] not in counts:
            expected = f"(B, H, S_k, {counts[0]} or {counts[1]}), since causal is {causal}"
            raise ValueError(f"{where}: indices has shape {shape}, expected {expected}")
        seqlen_k, count = shape[2:]
        seqlen_q = checked_size(f"{where}: seqlen_q", seqlen_k if seqlen_q is None else seqlen_q)
        bounds = indices.unbind(-1)
        if causal:
            lower = bounds if count == 2 else (bounds[0], seqlen_q)
            return _hiding(seqlen_q, *lower, 0, arange(seqlen_k, indices.device) - (seqlen_k - seqlen_q))
        return _hiding(seqlen_q, *(bounds if count == 4 else (bounds[0], seqlen_q, 0, bounds[1])))

    @classmethod
    def from_ranges(
        cls,
        q_ranges: Spans,
        k_ranges: Spans,
        types: Lengths | None,
        seqlen_q: int,
        seqlen_k: int,
        *,
        device: Device = None,
    ) -> ColumnMask:
        """FFA's rectangles (MagiAttention): rows of each range of q_ranges see columns of the range of k_ranges beside
        it, (R, 2) each, of half-open ranges. What several rectangles show is visible once.

        types, (R), are 0 full, 1 causal (the last row's diagonal is the last column), 2 inverse causal (columns from
        the diagonal on, which begins at the first row and column) or 3 both, that is the band between; None: all full.

        >>> print(ColumnMask.from_ranges([(0, 3), (3, 6)], [(0, 3), (0, 6)], [1, 2], 6, 6).picture())
        #.....
        ##....
        ###...
        ######
        .#####
        ..####

        Raises:
            ValueError: a column would need more than two hidden intervals, of which the first is named; or a range is
                not within the mask, or a type is none of these.
        """
        where = "ColumnMask.from_ranges"
        seqlen_q, seqlen_k = checked_size(f"{where}: seqlen_q", seqlen_q), checked_size(f"{where}: seqlen_k", seqlen_k)
        rows = checked_spans(f"{where}: q_ranges", q_ranges, seqlen_q)
        columns = checked_spans(f"{where}: k_ranges", k_ranges, seqlen_k)
        kinds = [0] * len(rows) if types is None else checked_sizes(f"{where}: types", types, most=3)
        for name, of in (("k_ranges", columns), ("types", kinds)):
            if len(of) != len(rows):
                raise ValueError(f"{where}: {name} has {len(of)} entries, expected {len(rows)}, as q_ranges")
        q_begin, q_end = torch.tensor(rows, device=device, dtype=torch.int64).reshape(-1, 2).T
        k_begin, k_end = torch.tensor(columns, device=device, dtype=torch.int64).reshape(-1, 2).T
        kind = torch.tensor(kinds, device=device, dtype=torch.int64)

        # Each rectangle shows one interval of rows to each of its columns.
        width = k_end - k_begin
        rectangle = torch.arange(len(rows), device=q_begin.device).repeat_interleave(width)
        column = torch.arange(len(rectangle), device=q_begin.device) + (k_end - width.cumsum(0))[rectangle]
        begin, end = q_begin[rectangle], q_end[rectangle]
        diagonal = column - (k_end - q_end)[rectangle]
        begin = torch.where(kind[rectangle] % 2 == 1, begin.maximum(diagonal), begin)
        diagonal = column - (k_begin - q_begin)[rectangle]
        end = torch.where(kind[rectangle] >= 2, end.minimum(diagonal + 1), end)

        # Put one behind the other, the columns are a line of S_k · S_q elements; what is hidden are the gaps between
        # intervals on it. Empty intervals cut gaps in two: at the ends of columns that is wanted, elsewhere not.
        ends_of_columns = torch.arange(seqlen_k + 1, device=begin.device) * seqlen_q
        begin, end = (column * seqlen_q + bound for bound in (begin, end))
        begin, end = begin[begin < end], end[begin < end]
        begin, order = torch.cat([ends_of_columns, begin]).sort()
        end = torch.cat([ends_of_columns, end])[order].cummax(0).values
        gap = (end[:-1] < begin[1:]).nonzero()[:, 0]
        hidden_column = end[gap] // max(seqlen_q, 1)
        first_row = hidden_column * seqlen_q
        shape = (1, 1, seqlen_k)
        hidden = hidden_column, end[gap] - first_row, begin[gap + 1] - first_row
        return cls(ranges_of_runs(where, shape, *hidden), seqlen_q)

    @classmethod
    def from_dense(cls, visible: Tensor) -> ColumnMask:
        """A mask written out: bool, (S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k), True where a row sees a column. It
        stays on its device, and is read.

        >>> print(ColumnMask.from_dense(torch.eye(3, dtype=torch.bool)).picture())
        #..
        .#.
        ..#

        Raises:
            ValueError: a column needs more than two hidden intervals, of which the first is named; or the shape is
                none of these.
        """
        where = "ColumnMask.from_dense"
        require_tensor(f"{where}: visible", visible)
        if visible.dtype != torch.bool:
            raise TypeError(f"{where}: visible has dtype {visible.dtype}, expected torch.bool")
        if not 2 <= visible.dim() <= 4:
            expected = "(S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k)"
            raise ValueError(f"{where}: visible has shape {tuple(visible.shape)}, expected {expected}")
        visible = visible[(None,) * (4 - visible.dim())].transpose(2, 3)  # (B, H, S_k, S_q)
        shape, seqlen_q = tuple(visible.shape[:3]), visible.shape[3]
        hidden = torch.nn.functional.pad(~visible.flatten(0, 2), (1, 1))  # (B · H · S_k, S_q + 2)
        column, begin = (hidden[:, 1:] & ~hidden[:, :-1]).nonzero().T
        _, end = (hidden[:, :-1] & ~hidden[:, 1:]).nonzero().T
        return cls(ranges_of_runs(where, shape, column, begin, end), seqlen_q)

    # The kinds. All are made on `device`; lengths and places that are tensors are read on the host.

    @classmethod
    def full(cls, seqlen_q: int, seqlen_k: int, *, device: Device = None) -> ColumnMask:
        """Hides nothing.

        >>> print(ColumnMask.full(2, 4).picture())
        ####
        ####
        """
        seqlen_k = checked_size("ColumnMask.full: seqlen_k", seqlen_k)
        return cls(torch.zeros(1, 1, seqlen_k, 4, dtype=torch.int32, device=device), seqlen_q)

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int, *, device: Device = None) -> ColumnMask:
        """Row i sees columns up to its diagonal, i + S_k - S_q.

        >>> print(ColumnMask.causal(4, 6).picture())
        ###...
        ####..
        #####.
        ######
        """
        seqlen_q = checked_size("ColumnMask.causal: seqlen_q", seqlen_q)
        seqlen_k = checked_size("ColumnMask.causal: seqlen_k", seqlen_k)
        return _seen(seqlen_q, arange(seqlen_k, device) - (seqlen_k - seqlen_q), seqlen_q)

    @classmethod
    def document(cls, lengths: Lengths, *, device: Device = None) -> ColumnMask:
        """Packed documents of these lengths, S of them in all: each token sees its own document.

        >>> print(ColumnMask.document([3, 1, 2]).picture())
        ###...
        ###...
        ###...
        ...#..
        ....##
        ....##
        """
        lengths = checked_sizes("ColumnMask.document: lengths", lengths)
        ends = list(itertools.accumulate(lengths))
        begins = [end - length for end, length in zip(ends, lengths, strict=True)]
        return _seen(sum(lengths), spread(begins, lengths, device), spread(ends, lengths, device))

    @classmethod
    def causal_document(cls, lengths: Lengths, *, device: Device = None) -> ColumnMask:
        """Packed documents of these lengths: each token sees its own document up to itself.

        >>> print(ColumnMask.causal_document([3, 1, 2]).picture())
        #.....
        ##....
        ###...
        ...#..
        ....#.
        ....##
        """
        lengths = checked_sizes("ColumnMask.causal_document: lengths", lengths)
        ends = list(itertools.accumulate(lengths))
        return _seen(sum(lengths), arange(sum(lengths), device), spread(ends, lengths, device))

    @classmethod
    def share_question(cls, groups: Iterable[tuple[int, Lengths]], *, device: Device = None) -> ColumnMask:
        """Groups (question, answers) of lengths, packed: a question, and behind it its answers. Causal; an answer sees
        its question and itself, and no other answer. As in preference and reward training.

        >>> print(ColumnMask.share_question([(2, [2, 1]), (1, [1])]).picture())
        #......
        ##.....
        ###....
        ####...
        ##..#..
        .....#.
        .....##
        """
        lengths: list[int] = []
        ends: list[int] = []
        for i, (question, answers) in enumerate(groups):
            where = f"ColumnMask.share_question: groups[{i}]"
            parts = [checked_size(f"{where}[0]", question), *checked_sizes(f"{where}[1]", answers)]
            own = [sum(lengths) + end for end in itertools.accumulate(parts)]
            ends += own[-1:] + own[1:]
            lengths += parts
        return _seen(sum(lengths), arange(sum(lengths), device), spread(ends, lengths, device))

    @classmethod
    def sliding_window(cls, seqlen: int, window: int, *, device: Device = None) -> ColumnMask:
        """Causal; each token sees `window` tokens, the last of which is itself: as attention's window=(window - 1, 0).

        >>> print(ColumnMask.sliding_window(6, window=3).picture())
        #.....
        ##....
        ###...
        .###..
        ..###.
        ...###
        """
        column = arange(checked_size("ColumnMask.sliding_window: seqlen", seqlen), device)
        return _seen(seqlen, column, column + checked_size("ColumnMask.sliding_window: window", window, least=1))

    @classmethod
    def global_sliding_window(
        cls, seqlen: int, global_tokens: int, window: tuple[int, int], *, device: Device = None
    ) -> ColumnMask:
        """The first `global_tokens` tokens see all, and all see them; the others see (left, right) tokens on either
        side of their own. Not causal. As in Longformer (Beltagy et al. 2020, arXiv:2004.05150).

        >>> print(ColumnMask.global_sliding_window(7, global_tokens=1, window=(1, 1)).picture())
        #######
        ###....
        ####...
        #.###..
        #..###.
        #...###
        #....##
        """
        where = "ColumnMask.global_sliding_window"
        column = arange(checked_size(f"{where}: seqlen", seqlen), device)
        first = checked_size(f"{where}: global_tokens", global_tokens)
        left, right = checked_sizes(f"{where}: window", window, count=2)
        end = torch.where(column < first, seqlen, column + left + 1)
        return _hiding(seqlen, torch.full_like(column, first), column - right, end, seqlen)

    @classmethod
    def prefix_lm(cls, seqlen: int, prefix: int, *, device: Device = None) -> ColumnMask:
        """All see the first `prefix` tokens, which see no others; the rest is causal. As in T5 and PaliGemma.

        >>> print(ColumnMask.prefix_lm(6, prefix=3).picture())
        ###...
        ###...
        ###...
        ####..
        #####.
        ######
        """
        seqlen = checked_size("ColumnMask.prefix_lm: seqlen", seqlen)
        prefix = checked_size("ColumnMask.prefix_lm: prefix", prefix, most=seqlen)
        return cls.prefix_document([(prefix, seqlen)], device=device)

    @classmethod
    def prefix_document(cls, groups: Iterable[tuple[int, int]], *, device: Device = None) -> ColumnMask:
        """Packed documents (prefix, length), each with the mask of :meth:`prefix_lm`; length counts the prefix too.

        >>> print(ColumnMask.prefix_document([(2, 4), (1, 2)]).picture())
        ##....
        ##....
        ###...
        ####..
        ....#.
        ....##
        """
        lengths: list[int] = []
        firsts: list[int] = []
        ends: list[int] = []
        for i, (prefix, length) in enumerate(groups):
            length = checked_size(f"ColumnMask.prefix_document: groups[{i}][1]", length)
            prefix = checked_size(f"ColumnMask.prefix_document: groups[{i}][0]", prefix, most=length)
            begin = sum(lengths)
            lengths += prefix, length - prefix
            firsts += begin, begin + length  # the latter is beyond, so that the column's own row counts
            ends += (begin + length,) * 2
        first = arange(sum(lengths), device).minimum(spread(firsts, lengths, device))
        return _seen(sum(lengths), first, spread(ends, lengths, device))

    @classmethod
    def causal_blockwise(cls, lengths: Lengths, *, device: Device = None) -> ColumnMask:
        """Packed blocks of these lengths, causal: each token sees its own block, and the last block sees all of them.
        As with many demonstrations and one query, in learning from context.

        >>> print(ColumnMask.causal_blockwise([2, 2, 2]).picture())
        #.....
        ##....
        ..#...
        ..##..
        #####.
        ######
        """
        lengths = checked_sizes("ColumnMask.causal_blockwise: lengths", lengths)
        seqlen, ends = sum(lengths), list(itertools.accumulate(lengths))
        last = seqlen - sum(lengths[-1:])
        return _hiding(seqlen, 0, arange(seqlen, device), spread(ends, lengths, device), last)

    @classmethod
    def random_eviction(cls, evicted_at: Tensor) -> ColumnMask:
        """Causal; key j leaves the cache at row evicted_at[..., j], the first that does not see it. int32 or int64,
        (S), (H, S) or (B, H, S); above j, or no row sees the key. It stays on its device, and is not read.

        >>> print(ColumnMask.random_eviction(torch.tensor([5, 2, 6, 4, 6, 6])).picture())
        #.....
        ##....
        #.#...
        #.##..
        #.#.#.
        ..#.##
        """
        where = "ColumnMask.random_eviction: evicted_at"
        require_tensor(where, evicted_at)
        if evicted_at.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{where} has dtype {evicted_at.dtype}, expected torch.int32 or torch.int64")
        if not 1 <= evicted_at.dim() <= 3:
            raise ValueError(f"{where} has shape {tuple(evicted_at.shape)}, expected (S), (H, S) or (B, H, S)")
        seqlen = evicted_at.shape[-1]
        return _seen(seqlen, arange(seqlen, evicted_at.device), evicted_at)

    @classmethod
    def qk_sparse(cls, seqlen: int, spans: Spans, *, device: Device = None) -> ColumnMask:
        """Causal, but tokens within one of the `spans` [begin, end) see none of their own span, not even themselves;
        later tokens see it. A span that begins at 0 has rows that see nothing. Spans ascend and do not overlap.

        >>> print(ColumnMask.qk_sparse(6, [(2, 4)]).picture())
        #.....
        ##....
        ##....
        ##....
        #####.
        ######
        """
        lengths, owners = spans_and_gaps("ColumnMask.qk_sparse", spans, seqlen)
        ends = [0 if owner is None else owner[1] for owner in owners]
        return _seen(seqlen, arange(seqlen, device).maximum(spread(ends, lengths, device)), seqlen)

    @classmethod
    def chunked(cls, seqlen: int, chunk: int, *, device: Device = None) -> ColumnMask:
        """Causal within chunks of `chunk` tokens, of which the last may be shorter. As in Llama 4.

        >>> print(ColumnMask.chunked(5, chunk=2).picture())
        #....
        ##...
        ..#..
        ..##.
        ....#
        """
        column = arange(checked_size("ColumnMask.chunked: seqlen", seqlen), device)
        chunk = checked_size("ColumnMask.chunked: chunk", chunk, least=1)
        return _seen(seqlen, column, column - column % chunk + chunk)

    @classmethod
    def image_blocks(cls, spans: Spans, seqlen: int, *, window: int | None = None, device: Device = None) -> ColumnMask:
        """Causal, but tokens within one of the `spans` [begin, end) see all of their own span. As in Gemma 3, whose
        local layers see the last `window` tokens, as in :meth:`sliding_window`, and still all of their own span. Spans
        ascend and do not overlap.

        >>> print(ColumnMask.image_blocks([(1, 4)], 6).picture())
        #.....
        ####..
        ####..
        ####..
        #####.
        ######
        """
        lengths, owners = spans_and_gaps("ColumnMask.image_blocks", spans, seqlen)
        begin = spread([seqlen if owner is None else owner[0] for owner in owners], lengths, device)
        column = arange(seqlen, device)
        if window is None:
            return _seen(seqlen, column.minimum(begin), seqlen)
        end = spread([0 if owner is None else owner[1] for owner in owners], lengths, device)
        reach = column + checked_size("ColumnMask.image_blocks: window", window, least=1)
        return _seen(seqlen, column.minimum(begin), reach.maximum(end))

    @classmethod
    def tree(cls, parents: Lengths, *, context: int = 0, device: Device = None) -> ColumnMask:
        """Drafted tokens of speculative decoding: each sees itself, its ancestors, and `context` keys before the tree.

        Tokens stand in depth-first order, so that the descendants of a token follow it without a gap. parents[i] is the
        place of token i's parent, or -1 of a token that has none but the context. S_q is len(parents), S_k is
        context + S_q.

        >>> print(ColumnMask.tree([-1, 0, 1, 0, -1], context=2).picture())
        ###....
        ####...
        #####..
        ###..#.
        ##....#

        Raises:
            ValueError: tokens are not in depth-first order; the first that breaks it is named.
        """
        where = "ColumnMask.tree"
        context = checked_size(f"{where}: context", context)
        parents = parents.tolist() if isinstance(parents, Tensor) else list(parents)
        count = len(parents)
        ends = [count] * count  # of each token's descendants
        path: list[int] = []  # from a root to the token before
        for i, parent in enumerate(parents):
            while path and path[-1] != parent:
                ends[path.pop()] = i
            if not path and parent != -1:
                expected = f"-1, {i - 1} or an ancestor of {i - 1} (depth-first order)" if i else "-1"
                raise ValueError(f"{where}: parents[{i}] is {parent!r}, expected {expected}")
            path.append(i)
        lengths = [context] + [1] * count
        return _seen(count, spread([0, *range(count)], lengths, device), spread([count, *ends], lengths, device))


def ranges_of(function: str, mask: Any, q: Any, *, ragged: bool = False) -> Tensor | None:
    """What kernels read of the mask that `function` is given beside q. The compiled module looks at what it reads."""
    if mask is None:
        return None
    if not isinstance(mask, ColumnMask):
        raise TypeError(f"{function}: mask is {_C.described(mask)}, expected a flashtile.masks.ColumnMask or None")
    if ragged and mask.cu_seqlens is None:
        raise ValueError(f"{function}: mask is {mask}, expected one of a ragged batch, which concatenate() makes")
    if not ragged and mask.cu_seqlens is not None:
        raise ValueError(f"{function}: mask is {mask}, expected one of equally long sequences")
    if not ragged and isinstance(q, Tensor) and q.dim() == 4 and mask.seqlen_q != q.shape[1]:
        raise ValueError(f"{function}: mask has S_q = {mask.seqlen_q}, expected {q.shape[1]}, as q")
    return mask.ranges


def _hiding(seqlen_q: int, *bounds: Tensor | int) -> ColumnMask:
    return ColumnMask(ranges_hiding(seqlen_q, *bounds), seqlen_q)


def _seen(seqlen_q: int, begin: Tensor, end: Tensor | int) -> ColumnMask:
    """Each column is seen by rows [begin, end)."""
    end = end.maximum(begin) if isinstance(end, Tensor) else end
    return _hiding(seqlen_q, 0, begin, end, seqlen_q)


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
