"""How long a method takes, by a count of what ranks compute, put together and send each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ._heads import Heads
from ._pairs import Band, Places, calls_of, gathered_keys, visible
from ._rows import Kind, kinds_of, meeting
from .layout import Layout, Run, Runs, common, of_sets, places_in, rows_of, union, without

# Of H200s that are busy all the time, in FLOP/s, by the largest head dimension: forward and backward. These, and what
# copy engines of two of them carry, agree with benchmarks/results/h200x2-distributed-2026-11-28b.json.
_RATES = ((64, 565e12, 535e12), (128, 720e12, 580e12), (256, 705e12, 465e12))
NVLINK, NETWORK = 375e9, 50e9  # bytes a second that a rank sends, and receives meanwhile
_HEADS = 190e9  # at most, of heads: they do not lie one behind the other, so kernels send them and copy what arrives
_MEMORY = 3.5e12  # bytes a second of device memory that copies and sums get
_MESSAGE = 20e-6  # seconds until a message is on its way
_LAUNCH = 10e-6  # seconds that a kernel takes beside its work
_EDGE = 128  # keys further than it sees are computed for a row, at each end: half a tile's rows and half its keys
_PASSES = 5  # over dQ's bytes in a backward's other kernels: out and dout are read, sums of float32, and dQ written
_MULTIPROCESSORS, _BLOCK = 132, 128  # each has one thread block of a backward at a time, which takes so many keys
_MANY_WAVES = 16  # up to so many, blocks are divided where they would not end together (kDealtWaves)
_EXACT_RANKS = 64  # up to which each rank's part in each step is counted


@dataclass(frozen=True)
class Shape:
    """What a call is, as far as time depends on it."""

    queries: Layout
    keys: Layout
    band: Band
    documents: tuple[int, ...] | None
    places: Places
    batch: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    bytes: int  # of an element
    differentiable: bool

    def of_sets(self, degree: int) -> tuple[Layout, Layout]:
        """Rows and keys of the sets of ranks that exchange heads."""
        return of_sets(self.queries, degree), of_sets(self.keys, degree)


class Taken(NamedTuple):
    """What a forward or a backward takes on the rank that has most of it."""

    seconds: float
    computing: float  # seconds of them, without messages and what waits for them
    sent: float  # bytes


class _Call(NamedTuple):
    """One of the local kernels: how many pairs of a row and a key it computes, and its rows and keys, of a block's."""

    pairs: int
    rows: Run
    keys: Run
    is_full: bool


class _Member(NamedTuple):
    """What one of the ranks among which keys travel has to do."""

    rows: int
    keys: int
    steps: tuple[tuple[_Call, ...], ...]  # the calls over each block that comes round a ring, its own first
    begins_with_own: bool  # whether, where keys are gathered, the first call is over its own
    gathered: tuple[_Call, ...]  # the calls over gathered keys
    own: Runs  # which of the gathered keys are its own, counted among them,
    others: Runs  # and which are others'


def taken(shape: Shape, degree: int, inner: str, bandwidth: float, backward: bool) -> Taken:
    """By ranks of which `degree` exchange heads, while keys travel by `inner`."""
    costs, members = _Costs(shape, degree, bandwidth, backward), _members(shape, degree)
    found = _round_a_ring(members, costs) if inner == "ring" else _gathered(members, costs)
    if degree == 1:
        return found
    # Queries and outputs, keys and values leave once, or in backward their gradients.
    heads = costs.rows * shape.heads_q + costs.keys * shape.heads_k
    exchanged = heads * shape.batch * (shape.head_dim + shape.head_dim_v) * shape.bytes / degree * (1 - 1 / degree)
    messages = 4 if backward else 2  # dout, dq, dk and dv; q, k and v together, out
    seconds = exchanged / min(_HEADS, bandwidth) + messages * _MESSAGE
    return Taken(found.seconds + seconds, found.computing, found.sent + exchanged)


@lru_cache(maxsize=256)
def _members(shape: Shape, degree: int) -> tuple[_Member, ...]:
    queries, keys = shape.of_sets(degree)
    band, documents, places = shape.band, shape.documents, shape.places
    sharers, count = max(shape.heads_q // max(shape.heads_k, 1), 1), queries.ranks

    def calls(rows: Runs, block: Runs) -> tuple[_Call, ...]:
        return tuple(
            _Call(visible(call, _EDGE), call.rows, call.keys, call.window is None and call.is_dense)
            for call in calls_of(rows, block, band, documents, places, shape.batch)
        )

    members = []
    for member, (begins, run) in enumerate(gathered_keys(queries, keys, band, documents, places, sharers)):
        rows, own = queries.runs[member], keys.runs[member]
        if count <= _EXACT_RANKS:
            steps = tuple(calls(rows, keys.runs[(member - step) % count]) for step in range(count))
        else:  # as if blocks were alike
            pairs = sum(call.pairs for call in calls(rows, union([*run, *own]))) // count
            steps = ((_Call(pairs, (0, rows_of(rows)), (0, rows_of(own)), False),),) * count
        lies = [tuple(places_in(run, which)) for which in (common(run, own), without(run, own))]
        members.append(_Member(rows_of(rows), rows_of(own), steps, begins, calls(rows, run), *lies))
    last = max((step for member in members for step, of in enumerate(member.steps) if of), default=0)
    return tuple(member._replace(steps=member.steps[: last + 1]) for member in members)


class _Costs:
    """What things take in a forward, or in a backward, on the rank that has most rows, keys and heads."""

    def __init__(self, shape: Shape, degree: int, bandwidth: float, backward: bool):
        heads = Heads.of(shape.heads_q, shape.heads_k, degree)
        most_q, most_k = (shape.batch * max(end - begin for begin, end in runs) for runs in (heads.queries, heads.keys))
        width = shape.head_dim + shape.head_dim_v
        products = 3 * shape.head_dim + 2 * shape.head_dim_v if backward else width
        rates = next(x[1:] for x in _RATES if max(shape.head_dim, shape.head_dim_v) <= x[0])
        self.bandwidth, self.backward = bandwidth, backward
        self.rows, self.keys = (max(map(rows_of, layout.runs)) for layout in shape.of_sets(degree))
        self.rate = rates[backward] / (2 * products * max(most_q, 1))  # pairs a second
        self.of_row = most_q * (shape.head_dim if backward else shape.head_dim_v) * shape.bytes  # of a result
        self.of_key = most_k * width * shape.bytes  # of a key and its value, or their gradients
        self.blocks = most_k / _BLOCK  # of keys, for each key
        self.dtype = torch.float32 if shape.bytes == 4 else torch.bfloat16

    def compute(self, calls: Sequence[_Call], meanwhile: float = 0.0) -> float:
        """Calls, while so many bytes come, and as many go: they take their share of memory's bandwidth."""
        return sum(map(self._call, calls)) + 2 * meanwhile / _MEMORY

    def _call(self, call: _Call) -> float:
        seconds = call.pairs / self.rate + _LAUNCH
        if not self.backward:
            return seconds
        waves = (call.keys[1] - call.keys[0]) * self.blocks / _MULTIPROCESSORS
        if call.is_full and waves > _MANY_WAVES:  # of thread blocks that have all as much to do
            seconds *= math.ceil(waves) / waves
        return seconds + 2 * _LAUNCH + _PASSES * (call.rows[1] - call.rows[0]) * self.of_row / _MEMORY

    def merge(self, parts: Sequence[Kind], rows: int) -> float:
        """To put together parts of rows' results, as _rows.py does."""
        moved, launches = self._merged(parts, rows)
        return moved * self.of_row / _MEMORY + launches * _LAUNCH

    def merge_gradients(self, parts: Sequence[Kind], keys: int) -> float:
        """To do so with gradients of keys, and of their values."""
        moved, launches = self._merged(parts, keys)
        return moved * self.of_key / _MEMORY + 2 * launches * _LAUNCH

    def _merged(self, parts: Sequence[Kind], rows: int) -> tuple[float, int]:
        """How many results are read and written, and by how many kernels."""
        first, others = parts[:1], parts[1:]
        if first and first[0][:2] == (0, rows):  # the others are added to it
            groups = meeting(others)
            return self.rows_of(others) + 2 * sum(end - begin for begin, end, _ in groups), len(groups)
        return self.rows_of(parts) + rows, 1

    def kinds(self, runs: Iterable[Run]) -> list[Kind]:
        """Results of these rows or keys as calls leave them."""
        return [(*run, self.dtype) for run in runs]

    def rows_of(self, kinds: Sequence[Kind]) -> float:
        """How many rows of calls' results have as many bytes."""
        return sum((end - begin) * dtype.itemsize for begin, end, dtype in kinds) / self.dtype.itemsize

    def message(self, size: float) -> float:
        return size / self.bandwidth + _MESSAGE if size else 0.0


def _round_a_ring(members: Sequence[_Member], costs: _Costs) -> Taken:
    count, steps = len(members), len(members[0].steps)
    times, computing, sent = [0.0] * count, [0.0] * count, [0.0] * count
    travelling: list[list[Kind]] = [[] for _ in members]  # gradients of each one's keys
    for step in range(steps):
        come, ends = [], []
        for i, member in enumerate(members):
            calls, of_block = member.steps[step], travelling[i - step]
            # While a step computes, the keys of the next one come, and gradients that the member before has found.
            come.append(((costs.keys if step + 1 < steps else 0) + costs.rows_of(of_block)) * costs.of_key)
            seconds = costs.compute(calls, come[i])
            if costs.backward and step and calls:
                of_block[:] = kinds_of([*costs.kinds(call.keys for call in calls), *of_block])
                # A sum in float32 is read and written, and what is added has half its bytes.
                summed = [kind for kind in of_block if kind[2] != costs.dtype]
                seconds += 2 * len(summed) * _LAUNCH + 2.5 * costs.rows_of(summed) * costs.of_key / _MEMORY
            computing[i] += seconds
            ends.append(times[i] + seconds)
        times = [max(ends[i], max(times[i], times[i - 1]) + costs.message(come[i])) for i in range(count)]
        sent = [sent[i] + come[(i + 1) % count] for i in range(count)]
    until = []
    for i, member in enumerate(members):  # gradients go home, and what there is of each row and key is put together
        last, home = (i + steps - 1) % count, costs.rows_of(travelling[i]) * costs.of_key
        merging = costs.merge(costs.kinds(call.rows for calls in member.steps for call in calls), member.rows)
        if costs.backward:
            own = costs.kinds(call.keys for call in member.steps[0])
            merging += costs.merge_gradients([*own, *travelling[i]], member.keys)
        computing[i] += merging
        sent[last] += home
        until.append(max(times[i], times[last] + costs.message(home)) + merging)
    return Taken(max(until), max(computing), max(sent))


def _gathered(members: Sequence[_Member], costs: _Costs) -> Taken:
    most = 0.0  # gradients that leave a member
    for member in members if costs.backward else ():
        kinds = kinds_of(costs.kinds(call.keys for call in member.gathered))
        leave = [(*run, dtype) for begin, end, dtype in kinds for run in common(((begin, end),), member.others)]
        most = max(most, costs.rows_of(leave))
    times, computing, sent = [], [], []
    for member in members:
        own, others = (member.steps[0] if member.begins_with_own else ()), rows_of(member.others) * costs.of_key
        # Keys of its own that are not attended to by themselves are copied to where the others' come.
        first = costs.compute(own, others) if own else 2 * rows_of(member.own) * costs.of_key / _MEMORY
        rest = costs.compute(member.gathered)
        rest += costs.merge(costs.kinds(call.rows for call in (*own, *member.gathered)), member.rows)
        if costs.backward:
            # As much comes home as leaves whoever has most.
            whole, part = divmod(round(most), max(member.keys, 1))
            of_own = [call.keys for call in own] or member.own
            rest += costs.merge_gradients(costs.kinds([*of_own, *[(0, member.keys)] * whole, (0, part)]), member.keys)
        computing.append(first + rest)
        times.append(max(first, costs.message(others)) + rest)
        sent.append(others + most * costs.of_key)
    return Taken(max(times) + costs.message(most * costs.of_key), max(computing), max(sent))
