"""How keys and values reach the queries of all ranks: round a ring, or gathered at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._exchange import Group, Pending, packed, unpacked
from ._local import Local
from ._pairs import needed_keys
from ._rows import Rows, Sums
from .layout import Layout, Runs, common, places_in, rows_of

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Members:
    """The ranks of a group among which keys travel, in this order, and what each has. Member `index` is the caller."""

    group: Group
    ranks: tuple[int, ...]
    index: int
    queries: Layout
    keys: Layout

    @property
    def rank(self) -> int:
        return self.ranks[self.index]

    def neighbour(self, distance: int) -> int:
        return (self.index + distance) % len(self.ranks)


class Ring:
    """K and V pass from each member to the next while they are attended to; dK and dV travel with their keys (Ring
    Attention, Liu et al. 2023). A block goes no further than there are members that see it."""

    def __init__(self, members: Members, local: Local):
        self.members, self.local = members, local

    def steps(self) -> int:
        """How many blocks a member gets, its own included: up to the last step in which any sees a key."""
        count, local = len(self.members.ranks), self.local
        for step in reversed(range(1, count)):
            for member in range(count):
                rows, keys = self.members.queries.runs[member], self.members.keys.runs[(member - step) % count]
                if needed_keys(rows, keys, local.band, local.documents):
                    return step + 1
        return 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        total, steps, block = self.local.begin(q, v.shape[-1]), self.steps(), packed([k, v])
        for step in range(steps):
            coming = self._pass_on(block, step + 1, [k, v]) if step + 1 < steps else None
            self.local.add_block(total, q, *unpacked(block, self._shapes([k, v], step)), self._keys(step))
            if coming is not None:
                block = self._next(coming)
        return total

    def backward(self, needed, dout, dlse, q, k, v, out, state) -> Gradients:
        steps, block = self.steps(), packed([k, v])
        dq = Sums(q)
        arriving, of_block = None, torch.empty(0)
        for step in range(steps):
            coming = self._pass_on(block, step + 1, [k, v]) if step + 1 < steps else None
            shapes = self._shapes([k, v], step)
            block_k, block_v = unpacked(block, shapes)
            sums = [Sums(block_k), Sums(block_v)]
            self.local.add_gradients(
                (dq, *sums), needed, dout, dlse, (q, block_k, block_v), self._keys(step), out, state
            )
            if arriving is not None:
                for mine, theirs in zip(sums, unpacked(self._next(arriving), shapes), strict=True):
                    mine.add(0, theirs.shape[1], theirs)
            of_block = packed([x.finish(torch.float32) for x in sums])
            if coming is not None:
                arriving = self._pass_on(of_block, step + 1, [k, v])
                block = self._next(coming)
        if steps > 1:
            of_block = self._return(of_block, steps - 1, torch.Size([k.numel() + v.numel()]))
        dk, dv = unpacked(of_block, [k.shape, v.shape])
        return dq.finish(q.dtype), dk, dv

    def _keys(self, step: int) -> Runs:
        return self.members.keys.runs[self.members.neighbour(-step)]

    def _shapes(self, tensors: list[Tensor], step: int) -> list[torch.Size]:
        return [_shape(x, rows_of(self._keys(step))) for x in tensors]

    def _pass_on(self, block: Tensor, step: int, like: list[Tensor]) -> Pending:
        """Sends a block to the next member, and begins to receive that of `step`."""
        ranks, members = self.members.ranks, self.members
        numel = sum(shape.numel() for shape in self._shapes(like, step))
        receives = {ranks[members.neighbour(-1)]: [torch.Size([numel])]}
        return members.group.exchange({ranks[members.neighbour(1)]: [block]}, receives, block)

    def _next(self, coming: Pending) -> Tensor:
        return coming.wait()[self.members.ranks[self.members.neighbour(-1)]][0]

    def _return(self, block: Tensor, distance: int, shape: torch.Size) -> Tensor:
        """Sends what a block gathered to whom the block belongs."""
        ranks, members = self.members.ranks, self.members
        owner, holder = ranks[members.neighbour(-distance)], ranks[members.neighbour(distance)]
        return members.group.exchange({owner: [block]}, {holder: [shape]}, block).wait()[holder][0]


class AllGather:
    """Each member gets the keys that its queries see, all at once (as Llama 3 was trained, Dubey et al. 2024); dK and
    dV go back and are summed where they belong."""

    def __init__(self, members: Members, local: Local):
        self.members, self.local = members, local
        everything = ((0, members.keys.length),) if members.keys.length else ()
        self.needed = [
            needed_keys(rows, everything, local.band, local.documents, local.places()) for rows in members.queries.runs
        ]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        total = self.local.begin(q, v.shape[-1])
        gathered = self._gather([k, v])
        if self.needed[self.members.index]:
            self.local.add_block(total, q, *gathered, self.needed[self.members.index])
        return total

    def backward(self, needed, dout, dlse, q, k, v, out, state) -> Gradients:
        gathered, keys = self._gather([k, v]), self.needed[self.members.index]
        dq, *of_keys = (Sums(x) for x in (q, *gathered))
        if keys:
            found = dq, of_keys[0], of_keys[1]
            self.local.add_gradients(found, needed, dout, dlse, (q, *gathered), keys, out, state)
        dk, dv = self._scatter([x.finish(torch.float32) for x in of_keys], [k.shape, v.shape])
        return dq.finish(q.dtype), dk, dv

    def _shared(self, owner: int, reader: int) -> Runs:
        """The keys of a member that another one needs."""
        return common(self.members.keys.runs[owner], self.needed[reader])

    def _gather(self, tensors: list[Tensor]) -> list[Tensor]:
        me, ranks, own = self.members.index, self.members.ranks, self.members.keys.runs
        sends = {
            ranks[reader]: [_taken(x, places_in(own[me], self._shared(me, reader))) for x in tensors]
            for reader in range(len(ranks))
        }
        receives = {
            ranks[owner]: [_shape(x, rows_of(self._shared(owner, me))) for x in tensors] for owner in range(len(ranks))
        }
        came = self.members.group.exchange(sends, receives, tensors[0]).wait()
        gathered = [x.new_empty(_shape(x, rows_of(self.needed[me]))) for x in tensors]
        for owner in range(len(ranks)):
            places = places_in(self.needed[me], self._shared(owner, me))
            for x, part in zip(gathered, came[ranks[owner]], strict=True):
                _put(x, places, part)
        return gathered

    def _scatter(self, sums: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        me, ranks, own = self.members.index, self.members.ranks, self.members.keys.runs
        sends = {
            ranks[owner]: [_taken(x, places_in(self.needed[me], self._shared(owner, me))) for x in sums]
            for owner in range(len(ranks))
        }
        receives = {
            ranks[reader]: [_shape(x, rows_of(self._shared(me, reader))) for x in sums] for reader in range(len(ranks))
        }
        came = self.members.group.exchange(sends, receives, sums[0]).wait()
        totals = [x.new_zeros(shape) for x, shape in zip(sums, shapes, strict=True)]
        for reader in range(len(ranks)):  # in this order, whatever came first
            places = places_in(own[me], self._shared(me, reader))
            for x, part in zip(totals, came[ranks[reader]], strict=True):
                _put(x, places, part, add=True)
        return totals


def _shape(x: Tensor, rows: int) -> torch.Size:
    return torch.Size((x.shape[0], rows, *x.shape[2:]))


def _taken(x: Tensor, places: list[tuple[int, int]]) -> Tensor:
    return torch.cat([x[:, begin:end] for begin, end in places], 1) if places else x[:, :0]


def _put(x: Tensor, places: list[tuple[int, int]], part: Tensor, add: bool = False) -> None:
    first = 0
    for begin, end in places:
        rows = part[:, first : first + end - begin]
        x[:, begin:end].add_(rows) if add else x[:, begin:end].copy_(rows)
        first += end - begin
