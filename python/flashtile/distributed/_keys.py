"""How keys and values reach the queries of all ranks: round a ring, or gathered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ._exchange import Group
from ._local import Block, Local, Saved, cached_calls
from ._pairs import Band, Places, gathered_keys, needed_keys
from ._route import Delivery, Route, Routes, Spec, spec_of
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

    def neighbour(self, distance: int) -> int:
        return (self.index + distance) % len(self.ranks)


class Ring:
    """K and V pass from each member to the next while they are attended to; dK and dV travel with their keys (Ring
    Attention, Liu et al. 2023). A block goes no further than there are members that see it."""

    def __init__(self, members: Members, local: Local):
        self.members, self.local, self.routes = members, local, Routes()

    @cached_property
    def steps(self) -> int:
        """How many blocks a member gets, its own included."""
        members, local = self.members, self.local
        return _steps(members.queries, members.keys, local.band, local.documents, local.places())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        total, steps, block = self.local.begin(q, v.shape[-1]), self.steps, (k, v)
        for step in range(steps):
            coming = self._pass_on(block, step + 1) if step + 1 < steps else None
            self.local.add_block(total, q, block, self._keys(step))
            if coming is not None:
                block = _pair(coming.wait())
        return total

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Gradients:
        """(dq, dk, dv), of which dk and dv are of `dtype`."""
        steps, block = self.steps, (k, v)
        dq, of_own = Sums(q), (Sums(k), Sums(v))
        coming: Delivery | None = None
        for step in range(steps):
            before = coming
            keys = self._pass_on(block, step + 1) if step + 1 < steps else None
            of_block = (Sums(block[0]), Sums(block[1])) if step else of_own
            self.local.add_gradients((dq, *of_block), saved, q, block, self._keys(step))
            if step:  # what a member finds for its own keys need not travel
                if before is not None:
                    _add(of_block, before.wait())
                kind = self._travel_as(self.members.neighbour(-step), step, q.dtype)
                found = of_block[0].finish(kind), of_block[1].finish(kind)
                coming = self._pass_on_gradients(found, step, step + 1 == steps, q.dtype)
            if keys is not None:
                block = _pair(keys.wait())
        if coming is not None:
            _add(of_own, coming.wait())
        return dq.finish(q.dtype), *_finished(of_own, dtype, coming)

    def _keys(self, step: int) -> Runs:
        return self.members.keys.runs[self.members.neighbour(-step)]

    def _travel_as(self, owner: int, step: int, dtype: torch.dtype) -> torch.dtype:
        """As what gradients of an owner's keys leave the member that is `step` further: the result of one call as this
        left it, of `dtype`, and sums in float32."""
        members, local = self.members, self.local
        rows = members.queries.runs[(owner + step) % len(members.ranks)]
        calls = cached_calls(rows, members.keys.runs[owner], local.band, local.documents, local.places())
        return dtype if step == 1 and len(calls) <= 1 else torch.float32

    def _pass_on(self, block: Block, step: int) -> Delivery:
        """Sends keys and values to the next member, and begins to receive those of `step`."""
        return self._send("keys", block, 1, step, lambda _: block[0].dtype)

    def _pass_on_gradients(self, found: Block, step: int, is_last: bool, dtype: torch.dtype) -> Delivery:
        """Sends what the members up to `step` have found for a block to the next member, or at last to whom the block
        belongs, and begins to receive the like."""
        way = (-step, 0) if is_last else (1, step + 1)
        return self._send("gradients", found, *way, lambda owner: self._travel_as(owner, step, dtype))

    def _send(
        self, channel: str, block: Block, distance: int, step: int, dtype_of: Callable[[int], torch.dtype]
    ) -> Delivery:
        """Sends a block to the member at a distance, and begins to receive that of `step`; blocks of different owners
        may have different dtypes."""
        members, ranks = self.members, self.members.ranks

        def make() -> Route:
            tensors: dict[int, list[Spec]] = {}
            for index, rank in enumerate(ranks):
                owner = (index - step) % len(ranks)
                rows = rows_of(members.keys.runs[owner])
                tensors[rank] = [(_shape(x, rows), dtype_of(owner)) for x in block]
            # A block is attended to, or passed on, while the next one comes.
            return Route(channel, tensors, places, ahead=1)

        def places(receiver: int, sender: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return tensors if (ranks.index(receiver) - ranks.index(sender) - distance) % len(ranks) == 0 else ()

        route = self.routes.get((channel, distance, step, *map(spec_of, block)), make)
        sends = {ranks[members.neighbour(distance)]: [x.contiguous() for x in block]}
        return members.group.deliver(route, sends, block[0].device)


class AllGather:
    """Each member gets the keys that its queries see, all at once (as Llama 3 was trained, Dubey et al. 2024); dK and
    dV go back and are summed where they belong. A member that gets more keys than it has attends to its own ones
    meanwhile."""

    def __init__(self, members: Members, local: Local):
        self.members, self.local, self.routes = members, local, Routes()
        given = members.queries, members.keys, local.band, local.documents, local.places(), local.sharers
        self.begins_with_own, self.gathered = zip(*gathered_keys(*given), strict=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        total, me = self.local.begin(q, v.shape[-1]), self.members.index
        coming = self._gather(k, v)
        if self.begins_with_own[me]:
            self.local.add_block(total, q, (k, v), self.members.keys.runs[me])
        block = _pair(coming.wait())
        if self.gathered[me]:
            self.local.add_block(total, q, block, self.gathered[me])
        return total

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Gradients:
        """(dq, dk, dv), of which dk and dv are of `dtype`."""
        me, dq, of_own = self.members.index, Sums(q), (Sums(k), Sums(v))
        coming = self._gather(k, v)
        if self.begins_with_own[me]:
            self.local.add_gradients((dq, *of_own), saved, q, (k, v), self.members.keys.runs[me])
        block = _pair(coming.wait())
        dk, dv = Sums(block[0]), Sums(block[1])
        if self.gathered[me]:
            self.local.add_gradients((dq, dk, dv), saved, q, block, self.gathered[me])
        _, as_they_are = self._parts_of(me)
        wanted = [x for x, needed in zip(((dk, of_own[0]), (dv, of_own[1])), saved.needed[1:], strict=True) if needed]
        parts = [x.parts() if as_they_are else [(0, block[0].shape[1], x.finish(torch.float32))] for x, _ in wanted]
        return dq.finish(q.dtype), *_finished(of_own, dtype, self._scatter(parts, [total for _, total in wanted]))

    def _ways(self, owner: int, reader: int) -> tuple[tuple[Run, Run], ...]:
        return _ways(self.members.keys.runs[owner], self.gathered[reader])

    def _gather(self, k: Tensor, v: Tensor) -> Delivery:
        me, ranks = self.members.index, self.members.ranks

        def make() -> Route:
            tensors = {
                rank: [(_shape(x, rows_of(keys)), x.dtype) for x in (k, v)]
                for rank, keys in zip(ranks, self.gathered, strict=True)
            }
            return Route("gathered keys", tensors, places)

        def places(receiver: int, sender: int, tensors: Sequence[Tensor]) -> list[Tensor]:
            ways = self._ways(ranks.index(sender), ranks.index(receiver))
            return [x[:, slice(*read)] for x in tensors for _, read in ways]

        sends = {
            rank: [x[:, slice(*own)] for x in (k, v) for own, _ in self._ways(me, other)]
            for other, rank in enumerate(ranks)
        }
        route = self.routes.get(("keys", spec_of(k), spec_of(v)), make)
        return self.members.group.deliver(route, sends, k.device)

    def _parts_of(self, reader: int) -> tuple[list[Run], bool]:
        """Which of the keys that it gathers each part of a reader's gradients has, and whether parts are as its calls
        left them; else there is one, their sum in float32."""
        rows, keys, local = self.members.queries.runs[reader], self.gathered[reader], self.local
        calls = cached_calls(rows, keys, local.band, local.documents, local.places()) if keys else ()
        if len(calls) <= _PARTS:
            return [call.keys for call in calls], True
        return [(0, rows_of(keys))], False

    def _scatter(self, parts: list[list[tuple[int, int, Tensor]]], totals: list[Sums]) -> Delivery | None:
        """Adds to `totals` what all members have for the caller's keys. A tensor's parts go as they are: of two parts
        of 16 bits the sum would be no smaller, and would have to be made."""
        if not totals:
            return None
        me, ranks = self.members.index, self.members.ranks
        sends = {}
        for other, rank in enumerate(ranks):
            ways = self._ways(other, me)
            sends[rank] = [
                x[:, begin - first : end - first]
                for of_tensor in parts
                for first, last, x in of_tensor
                for (begin, end), _ in _overlaps((first, last), ways)
            ]

        likes = [x.like for x in totals]

        def make() -> Route:
            tensors = {
                rank: [
                    (_shape(x, end - begin), x.dtype if self._parts_of(reader)[1] else torch.float32)
                    for reader in range(len(ranks))
                    for x in likes
                    for begin, end in self._arriving(owner, reader)
                ]
                for owner, rank in enumerate(ranks)
            }
            return Route("gathered gradients", tensors, places)

        def places(receiver: int, sender: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            owner, reader = ranks.index(receiver), ranks.index(sender)
            counts = [len(likes) * len(self._arriving(owner, other)) for other in range(reader + 1)]
            return tensors[sum(counts[:-1]) : sum(counts)]

        route = self.routes.get(("gradients", *map(spec_of, likes)), make)
        delivery = self.members.group.deliver(route, sends, likes[0].device)
        come = iter(delivery.wait())
        for reader in range(len(ranks)):  # in this order, whatever came first
            for total in totals:
                for begin, end in self._arriving(me, reader):
                    total.add(begin, end, next(come))
        return delivery

    def _arriving(self, owner: int, reader: int) -> list[Run]:
        """Where the parts that a reader has of a gradient belong, among an owner's keys."""
        ways = self._ways(owner, reader)
        return [own for part in self._parts_of(reader)[0] for _, own in _overlaps(part, ways)]


@lru_cache(maxsize=1024)
def _steps(queries: Layout, keys: Layout, band: Band, documents: tuple[int, ...] | None, places: Places) -> int:
    """How many blocks go round a ring, up to the last step in which any member sees a key."""
    for step in reversed(range(1, keys.ranks)):
        for member in range(keys.ranks):
            block = keys.runs[(member - step) % keys.ranks]
            if needed_keys(queries.runs[member], block, band, documents, places):
                return step + 1
    return 1


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


def _add(sums: Sequence[Sums], parts: Sequence[Tensor]) -> None:
    for total, x in zip(sums, parts, strict=True):
        total.add(0, x.shape[1], x)


def _finished(sums: tuple[Sums, Sums], dtype: torch.dtype, added: Delivery | None) -> Block:
    """Sums, of which a delivery may have brought parts."""
    found = sums[0].finish(dtype), sums[1].finish(dtype)
    return found if added is None else (added.lasting(found[0]), added.lasting(found[1]))


def _pair(tensors: Sequence[Tensor]) -> Block:
    keys, values = tensors
    return keys, values


def _shape(x: Tensor, rows: int) -> torch.Size:
    return torch.Size((x.shape[0], rows, *x.shape[2:]))
