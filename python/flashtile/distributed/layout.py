"""Which rows of a sequence each rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import _C

Run = tuple[int, int]  # rows [begin, end)
Runs = tuple[Run, ...]  # in ascending order, none of them empty, no two of them adjacent

NAMES = ("zigzag", "head_tail", "contiguous")


@dataclass(frozen=True)
class Layout:
    """Which rows of a sequence each rank of a group holds.

    A rank has its rows one behind the other, in the order of the sequence. Each row has one rank; ranks may have
    different numbers of rows, or none.

    Args:
        runs: for each rank its runs of rows, pairs (begin, end), in ascending order.

    Raises:
        ValueError: a row has no rank or two, or runs are out of order.

    Example:
        >>> from flashtile.distributed import Layout
        >>> Layout.zigzag(8, ranks=2)
        Layout((((0, 2), (6, 8)), ((2, 6),)))
        >>> Layout.contiguous(10, ranks=4).rows(3)
        1
    """

    runs: tuple[Runs, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", tuple(_joined(f"Layout: runs[{i}]", x) for i, x in enumerate(self.runs)))
        end = 0
        for begin, stop in sorted(itertools.chain.from_iterable(self.runs)):
            if begin != end:
                raise ValueError(f"Layout: row {min(begin, end)} has {'no rank' if begin > end else 'two ranks'}")
            end = stop

    def __repr__(self) -> str:
        return f"Layout({self.runs!r})"

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @property
    def length(self) -> int:
        """How many rows there are."""
        return sum(map(self.rows, range(self.ranks)))

    def rows(self, rank: int) -> int:
        """How many of them a rank has."""
        return rows_of(self.runs[rank])

    def positions(self, rank: int) -> Tensor:
        """The places of a rank's rows in the sequence, int64."""
        return torch.cat([torch.arange(0), *(torch.arange(*run) for run in self.runs[rank])])

    @classmethod
    def of(cls, name: str, length: int, ranks: int) -> Layout:
        """The layout of this name."""
        if name not in NAMES:
            raise ValueError(f"layout is {name!r}, expected a Layout or one of {', '.join(map(repr, NAMES))}")
        return _named(name, length, ranks)

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> Layout:
        """Neighbouring rows: the sequence in as many chunks as there are ranks. Where it cannot be divided, the last
        ones are shorter, or empty."""
        return cls(tuple((chunk,) for chunk in _chunks(length, ranks)))

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> Layout:
        """Chunk r and chunk 2R - 1 - r of 2R, for rank r of R: under a causal mask, where rows see more keys the later
        they come, all ranks have the same work. PyTorch calls it head-tail."""
        chunks = _chunks(length, 2 * ranks)
        return cls(tuple((chunks[rank], chunks[-1 - rank]) for rank in range(ranks)))

    @classmethod
    def balanced(cls, work: Sequence[int] | Tensor, ranks: int, *, rounds: Sequence[int] = (2, 4, 8, 16)) -> Layout:
        """Chunks of equal length, as many for each rank, dealt out so that ranks have about the same work.

        Args:
            work: what each row has to do, such as the number of keys that it sees: see
                :func:`flashtile.distributed.work_of_rows`.
            ranks: how many there are.
            rounds: how many chunks a rank may have. The fewest are taken that bring the most loaded rank to within 3 %
                of the mean; if none do, those that come nearest.

        >>> Layout.balanced([1, 2, 3, 4, 1, 2, 3, 4], ranks=2, rounds=[2])
        Layout((((0, 4),), ((4, 8),)))
        """
        sums = torch.nn.functional.pad(torch.as_tensor(work, dtype=torch.float64).cumsum(0), (1, 0)).tolist()
        length = len(sums) - 1
        best: tuple[float, Layout] | None = None
        for each in rounds:
            chunks = _chunks(length, each * ranks)
            costs = [sums[end] - sums[begin] for begin, end in chunks]
            layout, most = _dealt(chunks, costs, ranks, each)
            imbalance = most * ranks / sums[-1] if sums[-1] else 1.0
            if best is None or imbalance < best[0]:
                best = imbalance, layout
            if best[0] <= 1.03:
                break
        if best is None:
            raise ValueError("Layout.balanced: rounds is empty, expected numbers of chunks")
        return best[1]


def require_layout(function: str, layout: Any) -> None:
    if not isinstance(layout, (str, Layout)):
        raise TypeError(f"{function}: layout is {_C.described(layout)}, expected a str or a Layout")


def layout_of(function: str, layout: Any, length: int, ranks: int) -> Layout:
    """The layout that a caller of `function` gave, by its name or as it is, of so many rows and ranks."""
    require_layout(function, layout)
    found = Layout.of(layout, length, ranks) if isinstance(layout, str) else layout
    if (found.ranks, found.length) != (ranks, length):
        expected = f"{length} rows on {ranks} ranks"
        raise ValueError(f"{function}: layout is of {found.length} rows on {found.ranks} ranks, expected {expected}")
    return found


def require_rows(function: str, name: str, layout: Layout, rows: Sequence[int]) -> None:
    """Refuses a tensor `name` of which ranks have other `rows` than the layout says."""
    for rank, count in enumerate(rows):
        if count != layout.rows(rank):
            expected = f"expected {layout.rows(rank)}, as the layout"
            raise ValueError(f"{function}: {name} has {count} rows on rank {rank}, {expected}")


@lru_cache(maxsize=1024)
def _named(name: str, length: int, ranks: int) -> Layout:
    return Layout.contiguous(length, ranks) if name == "contiguous" else Layout.zigzag(length, ranks)


@lru_cache(maxsize=1024)
def of_sets(layout: Layout, degree: int) -> Layout:
    """The layout of sets of `degree` neighbouring ranks, each of which has the rows of its members."""
    if degree == 1:
        return layout
    return Layout(tuple(together(layout.runs[i : i + degree]) for i in range(0, layout.ranks, degree)))


def together(runs: Sequence[Runs]) -> Runs:
    """The rows of several ranks."""
    return union(list(itertools.chain.from_iterable(runs)))


def rows_of(runs: Runs) -> int:
    return sum(end - begin for begin, end in runs)


def common(a: Runs, b: Runs) -> Runs:
    """What two lists of runs have in common."""
    both, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            both.append((begin, end))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return tuple(both)


def without(a: Runs, b: Runs) -> Runs:
    """What of one list of runs is not in another."""
    ends = [0, *itertools.chain.from_iterable(b), max((end for _, end in a), default=0)]
    return common(a, tuple((begin, end) for begin, end in zip(ends[::2], ends[1::2], strict=True) if begin < end))


def union(runs: Sequence[Run]) -> Runs:
    """Runs that may overlap, as runs that do not."""
    joined: list[Run] = []
    for begin, end in sorted(run for run in runs if run[0] < run[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return tuple(joined)


def places_in(runs: Runs, part: Runs) -> list[Run]:
    """Where each run of `part` lies among the rows of `runs`, counted one behind the other; `part` is part of these."""
    places, before, i = [], 0, 0
    for first, last in part:
        while runs[i][1] < last:
            before += runs[i][1] - runs[i][0]
            i += 1
        places.append((before + first - runs[i][0], before + last - runs[i][0]))
    return places


def _chunks(length: int, count: int) -> list[Run]:
    if count < 1:
        raise ValueError(f"Layout: there are {count} chunks, expected at least one for each of at least one rank")
    size = -(-length // count)
    return [(min(i * size, length), min((i + 1) * size, length)) for i in range(count)]


def _dealt(chunks: list[Run], costs: list[float], ranks: int, each: int) -> tuple[Layout, float]:
    """The heaviest chunk first, to whoever has least so far and room for one more."""
    taken: list[list[Run]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for i in sorted(range(len(chunks)), key=lambda i: (-costs[i], i)):
        rank = min((r for r in range(ranks) if len(taken[r]) < each), key=lambda r: (work[r], r))
        taken[rank].append(chunks[i])
        work[rank] += costs[i]
    return Layout(tuple(tuple(sorted(runs)) for runs in taken)), max(work)


def _joined(where: str, runs: Sequence[Run]) -> Runs:
    """The same without empty runs, and with adjacent ones as one."""
    last = 0
    for begin, end in runs:
        if not last <= begin <= end:
            raise ValueError(f"{where} is {tuple(runs)}, expected (begin, end) in ascending order")
        last = end
    return union(runs)
