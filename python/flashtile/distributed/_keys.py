"""How keys and values reach the queries of all ranks: round a ring, or gathered at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ._exchange import Group, Pending
from ._local import Block, Local, Saved
from ._pairs import needed_keys
from ._rows import Rows, Sums
from .layout import Layout, Runs, common, places_in, rows_of

Gradients = tuple[Tensor, Tensor, Tensor]

_cached_needs = lru_cache(maxsize=4096)(needed_keys)


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
                if _cached_needs(rows, keys, local.band, local.documents, local.places()):
                    return step + 1
        return 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        total, steps, block = self.local.begin(q, v.shape[-1]), self.steps(), (k, v)
        for step in range(steps):
            coming = self._pass_on(block, step + 1) if step + 1 < steps else None
            self.local.add_block(total, q, block, self._keys(step))
            if coming is not None:
                block = coming.wait()
        return total

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        steps, block = self.steps(), (k, v)
        dq = Sums(q)
        arriving: _Coming | None = None
        of_block = block
        for step in range(steps):
            coming = self._pass_on(block, step + 1) if step + 1 < steps else None
            dk, dv = Sums(block[0]), Sums(block[1])
            self.local.add_gradients((dq, dk, dv), saved, q, block, self._keys(step))
            if arriving is not None:
                of_others = arriving.wait()
                dk.add(0, of_others[0].shape[1], of_others[0])
                dv.add(0, of_others[1].shape[1], of_others[1])
            of_block = dk.finish(torch.float32), dv.finish(torch.float32)
            if coming is not None:
                arriving = self._pass_on(of_block, step + 1)
                block = coming.wait()
        if steps > 1:
            of_block = self._send(of_block, steps - 1, 0).wait()  # to whom the block belongs
        return dq.finish(q.dtype), *of_block

    def _keys(self, step: int) -> Runs:
        return self.members.keys.runs[self.members.neighbour(-step)]

    def _pass_on(self, block: Block, step: int) -> _Coming:
        """Sends a block to the next member, and begins to receive that of `step`."""
        return self._send(block, -1, step)

    def _send(self, block: Block, to: int, step: int) -> _Coming:
        """Sends a block `to` so many members back, and begins to receive that of `step` from so many ahead."""
        ranks, members = self.members.ranks, self.members
        rows = rows_of(self._keys(step))
        coming = block[0].new_empty(_shape(block[0], rows)), block[1].new_empty(_shape(block[1], rows))
        sends = {ranks[members.neighbour(-to)]: [x.contiguous() for x in block]}
        return _Coming(members.group.exchange(sends, {ranks[members.neighbour(to)]: coming}), coming)


@dataclass
class _Coming:
    """A block on its way."""

    pending: Pending
    block: Block

    def wait(self) -> Block:
        self.pending.wait()
        return self.block


class AllGather:
    """Each member gets the keys that its queries see, all at once (as Llama 3 was trained, Dubey et al. 2024); dK and
    dV go back and are summed where they belong."""

    def __init__(self, members: Members, local: Local):
        self.members, self.local = members, local
        everything = ((0, members.keys.length),) if members.keys.length else ()
        places = local.places()
        self.needed = [
            _cached_needs(rows, everything, local.band, local.documents, places) for rows in members.queries.runs
        ]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        total = self.local.begin(q, v.shape[-1])
        block, keys = self._gather(k, v), self.needed[self.members.index]
        if keys:
            self.local.add_block(total, q, block, keys)
        return total

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        block, keys = self._gather(k, v), self.needed[self.members.index]
        dq, dk, dv = Sums(q), Sums(block[0]), Sums(block[1])
        if keys:
            self.local.add_gradients((dq, dk, dv), saved, q, block, keys)
        of_keys = self._scatter([dk.finish(torch.float32), dv.finish(torch.float32)], [k.shape, v.shape])
        return dq.finish(q.dtype), of_keys[0], of_keys[1]

    def _shared(self, owner: int, reader: int) -> Runs:
        """The keys of a member that another one needs."""
        return common(self.members.keys.runs[owner], self.needed[reader])

    def _gather(self, k: Tensor, v: Tensor) -> Block:
        me, ranks, own = self.members.index, self.members.ranks, self.members.keys.runs
        rows = rows_of(self.needed[me])
        gathered = k.new_empty(_shape(k, rows)), v.new_empty(_shape(v, rows))
        sends, receives = {}, {}
        for other, rank in enumerate(ranks):
            sends[rank] = _parts((k, v), places_in(own[me], self._shared(me, other)))
            receives[rank] = _parts(gathered, places_in(self.needed[me], self._shared(other, me)))
        self.members.group.exchange(sends, receives).wait()
        return gathered

    def _scatter(self, sums: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        me, ranks, own = self.members.index, self.members.ranks, self.members.keys.runs
        totals = [Sums(x.new_empty(shape)) for x, shape in zip(sums, shapes, strict=True)]
        sends, receives, places = {}, {}, {}
        for other, rank in enumerate(ranks):
            sends[rank] = _parts(sums, places_in(self.needed[me], self._shared(other, me)))
            places[rank] = places_in(own[me], self._shared(me, other))
            receives[rank] = [x.new_empty(_shape(x, end - begin)) for x in sums for begin, end in places[rank]]
        self.members.group.exchange(sends, receives).wait()
        for rank in ranks:  # in this order, whatever came first
            for i, total in enumerate(totals):
                for n, (begin, end) in enumerate(places[rank]):
                    total.add(begin, end, receives[rank][i * len(places[rank]) + n])
        return [total.finish(torch.float32) for total in totals]


def _shape(x: Tensor, rows: int) -> torch.Size:
    return torch.Size((x.shape[0], rows, *x.shape[2:]))


def _parts(tensors: Sequence[Tensor], places: list[tuple[int, int]]) -> list[Tensor]:
    """Rows of each tensor, tensor by tensor."""
    return [x[:, begin:end] for x in tensors for begin, end in places]
