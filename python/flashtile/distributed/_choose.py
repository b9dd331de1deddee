"""Which method a call takes: the one that a count of bytes and FLOPs says takes least time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from ._heads import Heads
from ._pairs import ALIGNED, Band, Places, calls_of, gathered_keys, pieces_of, visible
from .layout import Layout, of_sets, rows_of, union, without

METHODS = ("auto", "ring", "all_gather", "ulysses", "ulysses_ring")

# Of H200s that are busy all the time, in FLOP/s, by the largest head dimension: forward, and backward, of long causal
# sequences; and what the copy engines of two of them carry (benchmarks/results: h200x2-distributed-2026-11-28).
_RATES = ((64, 565e12, 535e12), (128, 720e12, 580e12), (256, 705e12, 465e12))
_NVLINK, _NETWORK = 375e9, 50e9  # bytes a second that a rank sends, and receives meanwhile
_HEADS = 190e9  # at most, of heads: they do not lie one behind the other, so kernels send them and copy what arrives
_MEMORY = 3.5e12  # bytes a second of device memory that a merge gets
_MESSAGE = 20e-6  # seconds until a message is on its way
_LAUNCH = 10e-6  # seconds that a call of a kernel takes beside its work
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


@dataclass(frozen=True)
class Choice:
    """A method, with what is expected of it on the rank that takes longest, a forward and where wanted a backward."""

    name: str
    degree: int  # ranks that exchange heads for rows
    inner: str  # how keys travel among those that have the same heads
    seconds: float
    computing: float  # seconds of them, without messages and what waits for them
    sent: int  # bytes
    refused: str = ""  # why it cannot be taken

    def __str__(self) -> str:
        label = self.name if self.name != "ulysses_ring" else f"{self.name}, degree {self.degree}"
        if self.refused:
            return f"{label:<24}{self.refused}"
        return f"{label:<24}{1e3 * self.seconds:>10.3f} ms{1e3 * self.computing:>12.3f} ms{self.sent / 1e6:>12.1f} MB"


def choices(shape: Shape, bandwidth: float, method: str = "auto", degree: int | None = None) -> list[Choice]:
    """Those that `method` and `degree` leave, the quickest first, and at the end those that cannot be taken."""
    found = [_timed(shape, *kind, bandwidth) for kind in _kinds(shape.queries.ranks, method, degree)]
    return sorted(found, key=lambda x: (bool(x.refused), x.seconds))


@lru_cache(maxsize=256)
def choose(function: str, shape: Shape, method: str, degree: int | None) -> Choice:
    """The quickest of them."""
    ranks = shape.queries.ranks
    if degree is not None and (degree < 1 or ranks % degree):
        raise ValueError(
            f"{function}: ulysses_degree is {degree}, expected a divisor of {ranks}, the size of the group"
        )
    fitting = choices(shape, bandwidth_of(ranks), method, degree)
    if not fitting:
        raise ValueError(
            f"{function}: method is {method!r} with ulysses_degree {degree}, expected what fits {ranks} ranks"
        )
    if fitting[0].refused:
        raise NotImplementedError(f"{function}: method {method!r} cannot be taken: {fitting[0].refused}")
    return fitting[0]


def bandwidth_of(ranks: int) -> float:
    """NVLink's where torchrun says that all ranks of a group so large can be on one host."""
    return _NVLINK if ranks <= int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) else _NETWORK


@lru_cache(maxsize=256)
def _counted(shape: Shape, degree: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[bool, int], ...]]:
    """For each rank among which keys travel: the pairs of a row and a key in each step of a ring; and whether it begins
    with its own keys where they are gathered, and how many of others it gets."""
    queries, keys = _of_sets(shape, degree)
    members = queries.ranks
    band, documents, places = shape.band, shape.documents, shape.places
    pairs, gathered = [], []
    sharers = max(shape.heads_q // max(shape.heads_k, 1), 1)
    for member, (begins, run) in enumerate(gathered_keys(queries, keys, band, documents, places, sharers)):
        gathered.append((begins, rows_of(without(run, keys.runs[member]))))
        if members <= _EXACT_RANKS:
            blocks = [keys.runs[(member - step) % members] for step in range(members)]
        else:
            blocks = [union([*run, *keys.runs[member]])]
        of_blocks = [
            sum(visible(call) for call in calls_of(queries.runs[member], block, band, documents, places))
            for block in blocks
        ]
        if members > _EXACT_RANKS:
            of_blocks = [of_blocks[0] // members] * members
        pairs.append(tuple(of_blocks))
    return tuple(pairs), tuple(gathered)


def _kinds(ranks: int, method: str, degree: int | None) -> list[tuple[str, int, str]]:
    """(name, degree, how keys travel) of each method. In two dimensions they pass round rings: gathering them would
    need more memory, and gain little."""
    kinds = [("ring", 1, "ring"), ("all_gather", 1, "all_gather")]
    kinds += [("ulysses_ring", n, "ring") for n in range(2, ranks) if ranks % n == 0]
    kinds.append(("ulysses", ranks, "ring"))
    kinds = [kind for kind in kinds if degree in (None, kind[1])]
    if method == "ulysses_ring":  # which a degree of 1 or of all ranks makes one of the others
        kinds = [kind for kind in kinds if kind[2] == "ring"]
        return [kind for kind in kinds if kind[0] == method] or kinds
    return [kind for kind in kinds if method in ("auto", kind[0])]


def _timed(shape: Shape, name: str, degree: int, inner: str, bandwidth: float) -> Choice:
    heads = Heads.of(shape.heads_q, shape.heads_k, degree)
    refused = _refusal(shape, degree)
    if refused:
        return Choice(name, degree, inner, 0.0, 0.0, 0, refused)
    # Of the rank that has most of each.
    most_q, most_k = (max(end - begin for begin, end in runs) for runs in (heads.queries, heads.keys))
    rows, keys = (max(map(rows_of, layout.runs)) for layout in _of_sets(shape, degree))
    pairs, gathered = _counted(shape, degree)
    width = shape.head_dim + shape.head_dim_v
    row_bytes = shape.batch * width * shape.bytes  # of a row of queries and outputs of a head, or of keys and values
    rates = next(x[1:] for x in _RATES if max(shape.head_dim, shape.head_dim_v) <= x[0])
    seconds = computing = 0.0
    sent = 0
    for backward in (False, True) if shape.differentiable else (False,):
        products = 3 * shape.head_dim + 2 * shape.head_dim_v if backward else width
        rate = rates[backward] / (2 * products * shape.batch * most_q)  # pairs a second
        # A part waits for the others, and all are read once, at most: see _rows.py.
        merge = rows * most_q * shape.batch * shape.head_dim_v * shape.bytes / _MEMORY + _LAUNCH
        of_key, of_gradient = most_k * row_bytes, 4 * most_k * shape.batch * width if backward else 0
        if inner == "ring":
            blocks = [max(of) / rate + merge for of in zip(*pairs, strict=True) if max(of)]
            # While a step computes, the keys of the next one come, and gradients of the one before leave. Those of the
            # first block that is another's leave as a call left them, the rest as two did or in float32.
            messages = [of_key] * (len(blocks) - 1)
            messages[2:] = [of_key + of_gradient] * len(messages[2:])
            last = (of_gradient / (2 if len(blocks) == 2 else 1)) if len(blocks) > 1 else 0
            waits = [keys * message / bandwidth + _MESSAGE for message in messages]
            seconds += sum(map(max, blocks, waits)) + blocks[-1] if blocks else 0
            seconds += keys * last / bandwidth + _MESSAGE if last else 0
            moved = keys * int(sum(messages) + last)
        else:
            own = [of[0] / rate if begins else 0.0 for of, (begins, _) in zip(pairs, gathered, strict=True)]
            come = [others * of_key / bandwidth + _MESSAGE if others else 0.0 for _, others in gathered]
            rest = [sum(of) / rate - first + merge for of, first in zip(pairs, own, strict=True)]
            blocks = [max(x + y for x, y in zip(own, rest, strict=True))]
            most = max(others for _, others in gathered)
            seconds += max(max(x, y) + z for x, y, z in zip(own, come, rest, strict=True))
            seconds += most * of_gradient / bandwidth + _MESSAGE if most and backward else 0  # two parts of 16 bits
            moved = most * (of_key + of_gradient)
        computing += sum(blocks)
        # Queries and outputs, keys and values leave once, or in backward their gradients.
        exchanged = (rows * shape.heads_q + keys * shape.heads_k) * row_bytes // degree * (degree - 1) // degree
        seconds += exchanged / min(_HEADS, bandwidth) + 2 * _MESSAGE if degree > 1 else 0
        sent += moved + exchanged
    return Choice(name, degree, inner, seconds, computing, sent)


def _of_sets(shape: Shape, degree: int) -> tuple[Layout, Layout]:
    """Rows and keys of the sets of ranks that exchange heads."""
    return of_sets(shape.queries, degree), of_sets(shape.keys, degree)


def _refusal(shape: Shape, degree: int) -> str:
    if shape.heads_q < degree:
        return f"{degree} ranks share {shape.heads_q} query heads"
    if shape.places != Places.ALL or degree == shape.queries.ranks:
        return ""
    for layout in _of_sets(shape, degree):
        for runs in layout.runs:
            for piece in pieces_of(runs, shape.documents):
                origin = 0 if shape.documents is None else shape.documents[piece.document]
                if (piece.run[0] - origin) % ALIGNED:
                    return f"dropout needs chunks that begin at multiples of {ALIGNED} rows of a document"
    return ""
