"""How keys and values reach the queries of all ranks: round a ring, or gathered at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ._exchange import Group, Pending
from ._local import Block, Local, Saved, cached_calls
from ._pairs import Band, Places, needed_keys
from ._rows import Rows, Sums
from .layout import Layout, Run, Runs, common, places_in, rows_of

Gradients = tuple[Tensor, Tensor, Tensor]

_PARTS = 2  # so many of a gradient of gathered keys travel as they are; more would have more bytes than their sum


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
        """How many blocks a member gets, its own included."""
        members, local = self.members, self.local
        return _steps(members.queries, members.keys, local.band, local.documents, local.places())

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
        self.needed = _needed(members.queries, members.keys, local.band, local.documents, local.places())

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
        _, as_they_are = self._parts_of(self.members.index)
        wanted = [(x, like) for x, like, needed in zip((dk, dv), (k, v), saved.needed[1:], strict=True) if needed]
        parts = [x.parts() if as_they_are else [(0, block[0].shape[1], x.finish(torch.float32))] for x, _ in wanted]
        of_keys = iter(self._scatter(parts, [like for _, like in wanted]))
        dk_of_own, dv_of_own = (
            next(of_keys) if needed else torch.zeros_like(like)
            for like, needed in zip((k, v), saved.needed[1:], strict=True)
        )
        return dq.finish(q.dtype), dk_of_own, dv_of_own

    def _ways(self, owner: int, reader: int) -> tuple[tuple[Run, Run], ...]:
        return _ways(self.members.keys.runs[owner], self.needed[reader])

    def _gather(self, k: Tensor, v: Tensor) -> Block:
        me, ranks = self.members.index, self.members.ranks
        rows = rows_of(self.needed[me])
        gathered = k.new_empty(_shape(k, rows)), v.new_empty(_shape(v, rows))
        sends, receives = {}, {}
        for other, rank in enumerate(ranks):
            sends[rank] = [x[:, slice(*own)] for x in (k, v) for own, _ in self._ways(me, other)]
            receives[rank] = [x[:, slice(*read)] for x in gathered for _, read in self._ways(other, me)]
        self.members.group.exchange(sends, receives).wait()
        return gathered

    def _parts_of(self, reader: int) -> tuple[list[Run], bool]:
        """Which of the keys that it gathers each part of a reader's gradients has, and whether parts are as its calls
        left them; else there is one, their sum in float32."""
        rows, keys, local = self.members.queries.runs[reader], self.needed[reader], self.local
        calls = cached_calls(rows, keys, local.band, local.documents, local.places()) if keys else ()
        if len(calls) <= _PARTS:
            return [call.keys for call in calls], True
        return [(0, rows_of(keys))], False

    def _scatter(self, parts: list[list[tuple[int, int, Tensor]]], likes: list[Tensor]) -> list[Tensor]:
        """The sum of what all members have for the keys of each, in float32. A tensor's parts go as they are: of two
        parts of 16 bits the sum would be no smaller, and would have to be made."""
        me, ranks = self.members.index, self.members.ranks
        sends, receives, places = {}, {}, {}
        for other, rank in enumerate(ranks):
            ways = self._ways(other, me)
            sends[rank] = [
                x[:, begin - first : end - first]
                for of_tensor in parts
                for first, last, x in of_tensor
                for (begin, end), _ in _overlaps((first, last), ways)
            ]
            of_reader, as_they_are = self._parts_of(other)
            places[rank] = [own for part in of_reader for _, own in _overlaps(part, self._ways(me, other))]
            receives[rank] = [
                x.new_empty(_shape(x, end - begin), dtype=x.dtype if as_they_are else torch.float32)
                for x in likes
                for begin, end in places[rank]
            ]
        self.members.group.exchange(sends, receives).wait()
        totals = [Sums(x) for x in likes]
        for rank in ranks:  # in this order, whatever came first
            come = iter(receives[rank])
            for total in totals:
                for begin, end in places[rank]:
                    total.add(begin, end, next(come))
        return [total.finish(torch.float32) for total in totals]


@lru_cache(maxsize=1024)
def _steps(queries: Layout, keys: Layout, band: Band, documents: tuple[int, ...] | None, places: Places) -> int:
    """How many blocks go round a ring, up to the last step in which any member sees a key."""
    for step in reversed(range(1, keys.ranks)):
        for member in range(keys.ranks):
            block = keys.runs[(member - step) % keys.ranks]
            if needed_keys(queries.runs[member], block, band, documents, places):
                return step + 1
    return 1


@lru_cache(maxsize=1024)
def _needed(
    queries: Layout, keys: Layout, band: Band, documents: tuple[int, ...] | None, places: Places
) -> tuple[Runs, ...]:
    """The keys that each member's rows see."""
    everything = ((0, keys.length),) if keys.length else ()
    return tuple(needed_keys(rows, everything, band, documents, places) for rows in queries.runs)


@lru_cache(maxsize=4096)
def _ways(own: Runs, needed: Runs) -> tuple[tuple[Run, Run], ...]:
    """The keys that one member has and another needs: where they lie among those of either."""
    shared = common(own, needed)
    return tuple(zip(places_in(own, shared), places_in(needed, shared), strict=True))


def _overlaps(part: Run, ways: tuple[tuple[Run, Run], ...]) -> Iterator[tuple[Run, Run]]:
    """What of a part of the needed keys belongs to their owner: where it lies among the needed, and the owner's."""
    for own, read in ways:
        begin, end = max(part[0], read[0]), min(part[1], read[1])
        if begin < end:
            yield (begin, end), (own[0] + begin - read[0], own[0] + end - read[0])


def _shape(x: Tensor, rows: int) -> torch.Size:
    return torch.Size((x.shape[0], rows, *x.shape[2:]))
