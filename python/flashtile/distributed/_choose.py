"""Which method a call takes: the one that a count of bytes and FLOPs says takes least time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from ._count import NETWORK, NVLINK, Shape, taken
from ._pairs import ALIGNED, Places, pieces_of

METHODS = ("auto", "ring", "all_gather", "ulysses", "ulysses_ring")


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
def choose(function: str, shape: Shape, method: str, degree: int | None, bandwidth: float) -> Choice:
    """The quickest of them."""
    ranks = shape.queries.ranks
    if degree is not None and (degree < 1 or ranks % degree):
        raise ValueError(
            f"{function}: ulysses_degree is {degree}, expected a divisor of {ranks}, the size of the group"
        )
    fitting = choices(shape, bandwidth, method, degree)
    if not fitting:
        raise ValueError(
            f"{function}: method is {method!r} with ulysses_degree {degree}, expected what fits {ranks} ranks"
        )
    if fitting[0].refused:
        raise NotImplementedError(f"{function}: method {method!r} cannot be taken: {fitting[0].refused}")
    return fitting[0]


def bandwidth_of(ranks: int) -> float:
    """NVLink's where torchrun says that all ranks of a group so large can be on one host: on that of the caller, so
    that ranks may differ."""
    return NVLINK if ranks <= int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) else NETWORK


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
    refused = _refusal(shape, degree)
    if refused:
        return Choice(name, degree, inner, 0.0, 0.0, 0, refused)
    works = (False, True) if shape.differentiable else (False,)
    seconds, computing, sent = map(sum, zip(*(taken(shape, degree, inner, bandwidth, x) for x in works), strict=True))
    return Choice(name, degree, inner, seconds, computing, int(sent))


def _refusal(shape: Shape, degree: int) -> str:
    if shape.heads_q < degree:
        return f"{degree} ranks share {shape.heads_q} query heads"
    if shape.places != Places.ALL or degree == shape.queries.ranks:
        return ""
    for layout in shape.of_sets(degree):
        for runs in layout.runs:
            for piece in pieces_of(runs, shape.documents):
                origin = 0 if shape.documents is None else shape.documents[piece.document]
                if (piece.run[0] - origin) % ALIGNED:
                    return f"dropout needs chunks that begin at multiples of {ALIGNED} rows of a document"
    return ""
