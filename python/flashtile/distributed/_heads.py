"""Ulysses: ranks exchange heads for rows, so that each attends to longer parts of the sequence with fewer heads
(DeepSpeed-Ulysses, Jacobs et al. 2023)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ._exchange import Group
from ._route import Route, Routes, spec_of
from .layout import Run, Runs, places_in, rows_of, together


@dataclass(frozen=True)
class Heads:
    """Which heads each of `ranks` takes: query heads, and the KV heads that they need. Where there are fewer KV heads
    than ranks, several take the same one, each with some of its query heads; one may have none."""

    queries: tuple[Run, ...]
    keys: tuple[Run, ...]

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, heads_q: int, heads_k: int, ranks: int) -> Heads:
        """
        >>> Heads.of(8, 4, ranks=2)
        Heads(queries=((0, 4), (4, 8)), keys=((0, 2), (2, 4)))
        >>> Heads.of(8, 2, ranks=4).keys
        ((0, 1), (0, 1), (1, 2), (1, 2))
        """
        group = heads_q // max(heads_k, 1)
        if heads_k >= ranks:
            cuts = [heads_k * rank // ranks for rank in range(ranks + 1)]
            keys = tuple(itertools.pairwise(cuts))
            return cls(tuple((begin * group, end * group) for begin, end in keys), keys)
        queries: list[Run] = []
        of_rank: list[Run] = []
        for head in range(heads_k):
            sharers = ranks * (head + 1) // heads_k - ranks * head // heads_k
            cuts = [head * group + group * i // sharers for i in range(sharers + 1)]
            for run in itertools.pairwise(cuts):
                queries.append(run)
                of_rank.append((head, head + 1) if run[0] < run[1] else (head, head))
        return cls(tuple(queries), tuple(of_rank))

    @property
    def replicates(self) -> bool:
        """Whether a KV head has several ranks."""
        return any(a[1] > b[0] for a, b in zip(self.keys, self.keys[1:], strict=False) if a[0] < a[1])


class Ulysses:
    """The exchange between ranks that each have some rows, of all heads, and ranks that have all of these rows, of some
    heads. `ranks` are those of the group that take part, of which the caller is number `index`."""

    def __init__(self, group: Group, ranks: Sequence[int], index: int, heads: Heads):
        self.group, self.ranks, self.index, self.heads = group, tuple(ranks), index, heads
        self.routes = Routes()

    def to_heads(
        self, tensors: Sequence[Tensor], rows: Sequence[Sequence[Runs]], heads: Sequence[Sequence[Run]]
    ) -> list[Tensor]:
        """Tensors (B, S_local, H, D) as (B, S, own heads, D), of each of which ranks have `rows`, and take `heads`."""
        sends: dict[int, list[Tensor]] = {rank: [] for rank in self.ranks}
        for x, runs_of, of_ranks in zip(tensors, rows, heads, strict=True):
            for rank, of_rank in zip(self.ranks, of_ranks, strict=True):
                own = runs_of[self.index]
                sends[rank] += [x[:, slice(*place), slice(*of_rank)] for place in places_in(own, own)]

        def make() -> Route:
            come_to = {
                rank: [
                    (
                        torch.Size(
                            (x.shape[0], rows_of(together(runs_of)), of_ranks[i][1] - of_ranks[i][0], x.shape[3])
                        ),
                        x.dtype,
                    )
                    for x, runs_of, of_ranks in zip(tensors, rows, heads, strict=True)
                ]
                for i, rank in enumerate(self.ranks)
            }
            return Route("heads", come_to, places)

        def places(receiver: int, sender: int, found: Sequence[Tensor]) -> list[Tensor]:
            return [
                x[:, slice(*place)]
                for x, runs_of in zip(found, rows, strict=True)
                for place in places_in(together(runs_of), runs_of[self.ranks.index(sender)])
            ]

        key = "heads", *map(spec_of, tensors), *map(tuple, rows), *map(tuple, heads)
        route = self.routes.get(key, make)
        delivery = self.group.deliver(route, sends, tensors[0].device)
        return [delivery.lasting(x) for x in delivery.wait()]

    def to_rows(self, x: Tensor, rows: Sequence[Runs], heads: Sequence[Run], heads_of_all: int) -> Tensor:
        """The way back of one tensor. What several ranks have of a head is summed, in the order of the ranks."""
        runs = together(rows)
        sends = {
            rank: [x[:, slice(*place)] for place in places_in(runs, of_rank)]
            for rank, of_rank in zip(self.ranks, rows, strict=True)
        }

        def make() -> Route:
            come_to = {
                rank: [
                    (torch.Size((x.shape[0], rows_of(own), end - begin, x.shape[3])), x.dtype) for begin, end in heads
                ]
                for rank, own in zip(self.ranks, rows, strict=True)
            }
            return Route("rows", come_to, places)

        def places(receiver: int, sender: int, found: Sequence[Tensor]) -> list[Tensor]:
            own = rows[self.ranks.index(receiver)]
            return [found[self.ranks.index(sender)][:, slice(*place)] for place in places_in(own, own)]

        route = self.routes.get(("rows", spec_of(x), tuple(rows), tuple(heads)), make)
        found = self.group.deliver(route, sends, x.device).wait()
        total = x.new_empty(x.shape[0], rows_of(rows[self.index]), heads_of_all, x.shape[3])
        written = 0  # heads
        for (begin, end), of_rank in zip(heads, found, strict=True):
            place = total[:, :, begin:end]
            if begin < written:  # another rank has them, too
                place += of_rank
            else:
                place.copy_(of_rank)
            written = max(end, written)
        return total
