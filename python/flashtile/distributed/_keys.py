"""How keys and values reach the queries of all ranks: round a ring, or gathered at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._exchange import Group, Pending
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
        total, steps, block = self.local.begin(q, v.shape[-1]), self.steps(), [k, v]
        for step in range(steps):
            coming = self._pass_on(block, step + 1) if step + 1 < steps else None
            self.local.add_block(total, q, *block, self._keys(step))
            if coming is not None:
                block = coming.wait()
        return total

    def backward(self, needed, dout, dlse, q, k, v, out, state) -> Gradients:
        steps, block = self.steps(), [k, v]
        dq = Sums(q)
        arriving: _Block | None = None
        of_block: list[Tensor] = []
        for step in range(steps):
            coming = self._pass_on(block, step + 1) if step + 1 < steps else None
            sums = [Sums(x) for x in block]
            self.local.add_gradients((dq, *sums), needed, dout, dlse, (q, *block), self._keys(step), out, state)
            if arriving is not None:
                for mine, theirs in zip(sums, arriving.wait(), strict=True):
                    mine.add(0, theirs.shape[1], theirs)
            of_block = [x.finish(torch.float32) for x in sums]
            if coming is not None:
                arriving = self._pass_on(of_block, step + 1)
                block = coming.wait()
        if steps > 1:
            of_block = self._send(of_block, steps - 1, 0).wait()  # to whom the block belongs
        return dq.finish(q.dtype), of_block[0], of_block[1]

    def _keys(self, step: int) -> Runs:
        return self.members.keys.runs[self.members.neighbour(-step)]

    def _pass_on(self, block: list[Tensor], step: int) -> _Block:
        """Sends a block to the next member, and begins to receive that of `step`."""
        return self._send(block, -1, step)

    def _send(self, block: list[Tensor], to: int, step: int) -> _Block:
        """Sends a block `to` so many members back, and begins to receive that of `step` from so many ahead."""
        ranks, members = self.members.ranks, self.members
        coming = [x.new_empty(_shape(x, rows_of(self._keys(step)))) for x in block]
        sends = {ranks[members.neighbour(-to)]: [x.contiguous() for x in block]}
        return _Block(members.group.exchange(sends, {ranks[members.neighbour(to)]: coming}), coming)


@dataclass
class _Block:
    """Tensors on their way."""

    pending: Pending
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        self.pending.wait()
        return self.tensors


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
        gathered = [x.new_empty(_shape(x, rows_of(self.needed[me]))) for x in tensors]
        sends, receives = {}, {}
        for other, rank in enumerate(ranks):
            sends[rank] = _parts(tensors, places_in(own[me], self._shared(me, other)))
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


def _parts(tensors: list[Tensor], places: list[tuple[int, int]]) -> list[Tensor]:
    """Rows of each tensor, tensor by tensor."""
    return [x[:, begin:end] for x in tensors for begin, end in places]
