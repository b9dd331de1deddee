"""How keys and values reach the queries of all ranks: round a ring, or gathered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from ._exchange import Group
from ._local import Block, Local, Saved
from ._pairs import Band, Places, gathered_keys, needed_keys
from ._route import Delivery, Route, Routes, Spec, spec_of
from ._rows import Kind, Rows, Sums, kinds_of
from .layout import Layout, Run, Runs, common, places_in, rows_of

Gradients = tuple[Tensor, Tensor, Tensor]


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
    """K and V pass from each member to the next while they are attended to; dK and dV of keys that were seen travel
    with them (Ring Attention, Liu et al. 2023). A block goes no further than there are members that see it."""

    def __init__(self, members: Members, local: Local):
        self.members, self.local, self.routes = members, local, Routes()
        self.kinds = lru_cache(maxsize=None)(self._kinds)

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
            found = saved.of_keys(of_block)
            if step and found:  # what a member finds for its own keys need not travel
                if before is not None:
                    self._add(found, before, self.members.neighbour(-step), step - 1)
                coming = self._pass_on_gradients(found, saved.of_keys((k, v)), step)
            if keys is not None:
                block = _pair(keys.wait())
        if coming is not None:
            self._add(saved.of_keys(of_own), coming, self.members.index, steps - 1)
        return dq.finish(q.dtype), *_finished(of_own, dtype, coming)

    def _keys(self, step: int) -> Runs:
        return self.members.keys.runs[self.members.neighbour(-step)]

    def _kinds(self, owner: int, step: int, dtype: torch.dtype) -> list[Kind]:
        """The gradients of an owner's keys that leave the member which is `step` further: what it found, of `dtype`,
        and what came to it."""
        if step == 0:
            return []
        members = self.members
        rows = members.queries.runs[(owner + step) % len(members.ranks)]
        calls = self.local.calls(rows, members.keys.runs[owner])
        return kinds_of([*((*call.keys, dtype) for call in calls), *self.kinds(owner, step - 1, dtype)])

    def _add(self, sums: Sequence[Sums], came: Delivery, owner: int, step: int) -> None:
        """Adds the gradients of an owner's keys that left the member which is `step` further."""
        come = iter(came.wait())
        for total in sums:
            for begin, end, _ in self.kinds(owner, step, total.like.dtype):
                total.add(begin, end, next(come))

    def _pass_on(self, block: Block, step: int) -> Delivery:
        """Sends keys and values to the next member, and begins to receive those of `step`."""
        rows = [rows_of(runs) for runs in self.members.keys.runs]

        def make() -> Route:
            # A block is attended to, or passed on, while the next one comes.
            return self._route("keys", 1, step, lambda owner: [(_shape(x, rows[owner]), x.dtype) for x in block])

        return self._send(self.routes.get(("keys", step, *map(spec_of, block)), make), 1, block, block[0].device)

    def _pass_on_gradients(self, found: Sequence[Sums], likes: Sequence[Tensor], step: int) -> Delivery:
        """Sends what the members up to `step` have found for a block, of each of the tensors `likes`, to the next
        member, or at last to whom the block belongs, and begins to receive the like."""
        ways = [*((1, left + 1) for left in range(1, self.steps - 1)), (1 - self.steps, 0)]

        def specs(owner: int, left: int) -> list[Spec]:
            return [
                (_shape(x, end - begin), dtype) for x in likes for begin, end, dtype in self.kinds(owner, left, x.dtype)
            ]

        def make() -> list[Route]:
            routes = [self._route("gradients", *way, partial(specs, left=left)) for left, way in enumerate(ways, 1)]
            # What has come may be sent on as it is, from memory that must not be exchanged for larger meanwhile.
            room = max(route.size for route in routes)
            return [replace(route, room=room) for route in routes]

        route = self.routes.get(("gradients", *map(spec_of, likes)), make)[step - 1]
        tensors = [x for total in found for _, _, x, _ in total.parts()]
        return self._send(route, ways[step - 1][0], tensors, likes[0].device)

    def _route(self, channel: str, distance: int, step: int, specs: Callable[[int], list[Spec]]) -> Route:
        """To the member at a distance; by it each member gets the tensors `specs` of the owner that is `step` before
        it."""
        ranks = self.members.ranks

        def places(receiver: int, sender: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return tensors if (ranks.index(receiver) - ranks.index(sender) - distance) % len(ranks) == 0 else ()

        tensors = {rank: specs((index - step) % len(ranks)) for index, rank in enumerate(ranks)}
        return Route(channel, tensors, places, ahead=1)

    def _send(self, route: Route, distance: int, tensors: Sequence[Tensor], device: torch.device) -> Delivery:
        """Sends tensors to the member at a distance, and begins to receive the like."""
        members = self.members
        sends = {members.ranks[members.neighbour(distance)]: [x.contiguous() for x in tensors]}
        return members.group.deliver(route, sends, device)


class AllGather:
    """Each member gets the keys that its queries see, all at once (as Llama 3 was trained, Dubey et al. 2024); dK and
    dV go back and are summed where they belong. A member that gets more keys than it has attends to its own ones
    meanwhile."""

    def __init__(self, members: Members, local: Local):
        self.members, self.local, self.routes = members, local, Routes()
        given = members.queries, members.keys, local.band, local.documents, local.places(), local.sharers
        self.begins_with_own, self.gathered = zip(*gathered_keys(*given), strict=True)
        self.kinds = lru_cache(maxsize=None)(self._kinds)

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
        gathered = Sums(block[0]), Sums(block[1])
        if self.gathered[me]:
            self.local.add_gradients((dq, *gathered), saved, q, block, self.gathered[me])
        delivery = self._scatter(saved.of_keys(gathered), saved.of_keys(of_own))
        return dq.finish(q.dtype), *_finished(of_own, dtype, delivery)

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

    def _kinds(self, reader: int, dtype: torch.dtype) -> list[Kind]:
        """The gradients that a reader has of the keys that it gathers, where its calls' are of `dtype`."""
        calls = self.local.calls(self.members.queries.runs[reader], self.gathered[reader])
        return kinds_of([(*call.keys, dtype) for call in calls])

    def _scatter(self, gathered: list[Sums], totals: list[Sums]) -> Delivery | None:
        """Adds to `totals` what all members have for the caller's keys. What it has itself stays where it lies."""
        if not totals:
            return None
        me, ranks, likes = self.members.index, self.members.ranks, [x.like for x in totals]
        parts = [part for total in gathered for part in total.parts()]
        found = [
            [
                x[:, begin - first : end - first]
                for first, last, x, _ in parts
                for (begin, end), _ in _overlaps((first, last), self._ways(other, me))
            ]
            for other in range(len(ranks))
        ]

        def make() -> Route:
            tensors = {
                rank: [
                    (_shape(x, end - begin), dtype)
                    for reader in range(len(ranks))
                    for x in likes
                    for begin, end, dtype in self._arriving(owner, reader, x.dtype)
                    if reader != owner
                ]
                for owner, rank in enumerate(ranks)
            }
            return Route("gathered gradients", tensors, places)

        def places(receiver: int, sender: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            owner, reader = ranks.index(receiver), ranks.index(sender)
            counts = [
                sum(len(self._arriving(owner, other, x.dtype)) for x in likes if other != owner)
                for other in range(reader + 1)
            ]
            return tensors[sum(counts[:-1]) : sum(counts)]

        route = self.routes.get(("gradients", *map(spec_of, likes)), make)
        sends = {rank: found[other] for other, rank in enumerate(ranks) if other != me}
        delivery = self.members.group.deliver(route, sends, likes[0].device)
        come = iter(delivery.wait())
        for reader in range(len(ranks)):  # in this order, whatever came first
            of_reader = iter(found[me]) if reader == me else come
            for total in totals:
                for begin, end, _ in self._arriving(me, reader, total.like.dtype):
                    total.add(begin, end, next(of_reader))
        return delivery

    def _arriving(self, owner: int, reader: int, dtype: torch.dtype) -> list[Kind]:
        """What a reader has of the gradient of an owner's keys, by where it belongs among these."""
        ways = self._ways(owner, reader)
        return [
            (*own, kind) for first, last, kind in self.kinds(reader, dtype) for _, own in _overlaps((first, last), ways)
        ]


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


def _finished(sums: tuple[Sums, Sums], dtype: torch.dtype, added: Delivery | None) -> Block:
    """Sums, of which a delivery may have brought parts, and which of several entries may lie among gathered ones."""
    dk, dv = (x.finish(dtype).contiguous() for x in sums)
    return (dk, dv) if added is None else (added.lasting(dk), added.lasting(dv))


def _pair(tensors: Sequence[Tensor]) -> Block:
    keys, values = tensors
    return keys, values


def _shape(x: Tensor, rows: int) -> torch.Size:
    return torch.Size((x.shape[0], rows, *x.shape[2:]))
