"""Which calls of the local kernels make up a rank's share: its queries against keys that lie elsewhere in the sequence.

All numbers are of the host. A band's diagonal is at j = i + shift, for row i and key j of the whole sequence.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from .layout import Layout, Run, Runs, common, rows_of, union, without

FAR = 1 << 40  # beyond any distance


class Band(NamedTuple):
    """Row i sees keys from i + shift - left to i + shift + right, inclusive."""

    left: int = FAR
    right: int = FAR
    shift: int = 0

    @classmethod
    def of(cls, causal: bool, window: tuple[int | None, int | None] | None, shift: int = 0) -> Band:
        left, right = (FAR if side is None else side for side in window or (None, None))
        return cls(left, min(right, 0) if causal else right, shift)

    def keys(self, rows: Run) -> Run:
        """Those that any of the rows sees, of all that could be."""
        return rows[0] + self.shift - self.left, rows[1] + self.shift + self.right

    def rows(self, keys: Run) -> Run:
        """The rows that see any of the keys."""
        return keys[0] - self.shift - self.right, keys[1] - self.shift + self.left

    def within(self, rows: Run, keys: Run) -> tuple[int | None, int | None] | None:
        """The window of a call of these rows and keys alone, whose last row meets its last key; None: all are seen."""
        if keys[1] - 1 <= rows[0] + self.shift + self.right and keys[0] >= rows[1] - 1 + self.shift - self.left:
            return None
        ahead = self.shift + rows[1] - keys[1]  # how far the band's diagonal is ahead of the call's
        left, right = (None if side > FAR // 2 else side for side in (self.left - ahead, self.right + ahead))
        return left, right

    def follows_order(self) -> bool:
        """Whether what rows see depends on the order of rows and keys alone, so that both may have gaps."""
        return self.left >= FAR // 2 and (self.right == 0 or self.right >= FAR // 2)


class Piece(NamedTuple):
    """Neighbouring rows of one document."""

    document: int
    run: Run  # in the whole sequence
    first: int  # among the rows of the rank


class Part(NamedTuple):
    """Rows and keys of one document, or of parts of it, as a rank has them."""

    document: int
    rows: Run
    keys: Run
    runs: Runs  # where the rows lie in the whole sequence
    window: tuple[int | None, int | None] | None
    # Where the first row and the first key lie in the document, and how far the band's diagonal is ahead of the call's:
    # of calls without gaps.
    place: tuple[int, int] = (0, 0)
    ahead: int = 0


@dataclass(frozen=True)
class Call:
    """One call of the local kernels. With several sequences it is one of a batch, whose sequences lie one behind the
    other: of a dense one, if they are equally long, or of a ragged one; some may have no rows, or no keys. `window` is
    that of all of them."""

    sequences: tuple[Part, ...]

    @property
    def rows(self) -> Run:
        return self.sequences[0].rows[0], self.sequences[-1].rows[1]

    @property
    def keys(self) -> Run:
        return self.sequences[0].keys[0], self.sequences[-1].keys[1]

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        return self.sequences[0].window

    @property
    def is_dense(self) -> bool:
        """Whether its sequences are equally long, so that they are the entries of a dense batch."""
        return len({(x.rows[1] - x.rows[0], x.keys[1] - x.keys[0]) for x in self.sequences}) == 1


def pieces_of(runs: Runs, documents: Sequence[int] | None) -> list[Piece]:
    """The runs, cut where documents begin: `documents` are their begins, and the end of the last."""
    first, pieces = 0, []
    for begin, end in runs:
        if documents is None:
            pieces.append(Piece(0, (begin, end), first))
        else:
            for document, cut in _cut(begin, end, documents):
                pieces.append(Piece(document, cut, first + cut[0] - begin))
        first += end - begin
    return pieces


class Places(IntEnum):
    """What a call has to know of where its elements lie."""

    ANY = 0  # nothing, so that rows and keys may have gaps
    DISTANCES = 1  # how far they are apart: for ALiBi
    ALL = 2  # all, and each begins at a multiple of ALIGNED in its document: for dropout


ALIGNED = 16


def needed_keys(
    rows: Runs, keys: Runs, band: Band, documents: Sequence[int] | None = None, places: Places = Places.ANY
) -> Runs:
    """Which of the keys any of the rows sees, and where places count, those before them from a multiple of ALIGNED."""
    of_document, needed = _by_document(keys, documents), []
    for piece in pieces_of(rows, documents):
        begin, end = band.keys(piece.run)
        if places == Places.ALL:
            origin = 0 if documents is None else documents[piece.document]
            begin = _down(begin - origin, ALIGNED) + origin
        needed += [(max(begin, k.run[0]), min(end, k.run[1])) for k in of_document.get(piece.document, ())]
    return union(needed)


@lru_cache(maxsize=1024)
def gathered_keys(
    queries: Layout, keys: Layout, band: Band, documents: tuple[int, ...] | None, places: Places, sharers: int
) -> tuple[tuple[bool, Runs], ...]:
    """For each member whether it attends to its own keys first, and which keys it gathers: all that its rows see, or
    those of them that are not its own. That takes a pass over its results to put them together, so it is done where
    keys are so many that they take some three times as long to come, by what an H200 and the way to the next one give
    (3.5 TB/s for 6 bytes of a result's element, 375 GB/s for 4 of a key's); `sharers` query heads share a KV head."""
    everything, found = ((0, keys.length),) if keys.length else (), []
    for rows, own in zip(queries.runs, keys.runs, strict=True):
        needed = needed_keys(rows, everything, band, documents, places)
        others = without(needed, own)
        begins_with_own = 2 * rows_of(others) >= sharers * rows_of(rows) > 0
        found.append((begins_with_own, others if begins_with_own else needed))
    return tuple(found)


def calls_of(
    rows: Runs,
    keys: Runs,
    band: Band,
    documents: Sequence[int] | None = None,
    places: Places = Places.ANY,
    entries: int = 1,
) -> list[Call]:
    """The calls whose results together are those of the rows over these keys. Rows and keys of a rank lie one behind
    the other. Of a batch with one entry, rows that each see keys of their own are the sequences of one call: it fills
    the GPU better than one for each would, and what it writes lies where it belongs. The first call over a rank's own
    keys has all rows and keys, also those that see nothing: to its results those of others are added. Over keys that
    were gathered only a call without others has all, as the gradients of all keys of a call travel.
    """
    if rows == keys and band.shift == 0 and band.follows_order() and places == Places.ANY:
        sequences = list(_in_order(rows, documents, band))
    else:
        sequences = _pairs(rows, keys, band, documents, ALIGNED if places == Places.ALL else 1)
        if places == Places.ANY:
            sequences = _merged(sequences)
    if entries > 1 or places == Places.ALL:
        return [Call((sequence,)) for sequence in sequences]
    calls = _packed(sequences, places != Places.ANY)
    if calls and (rows == keys or (len(calls) == 1 and common(rows, keys))):
        calls[0] = Call(tuple(_without_gaps(calls[0].sequences, (rows_of(rows), rows_of(keys)))))
    return calls


def visible(call: Call, margin: int = 0) -> int:
    """How many pairs of a row and a key a call's rows see, or would if its windows went so much further."""
    total = 0
    for sequence in call.sequences:
        rows, keys = (end - begin for begin, end in (sequence.rows, sequence.keys))
        left, right = (FAR if side is None else side for side in sequence.window or (None, None))
        total += _visible(rows, keys, left + margin - (keys - rows), right + margin + keys - rows)
    return total


def _visible(rows: int, keys: int, left: int, right: int) -> int:
    """Pairs with -left ≤ j - i ≤ right."""

    def up_to(distance: int) -> int:  # pairs with j - i ≤ distance
        # Row i has clamp(i + distance + 1, 0, keys) of them.
        first = max(0, -distance)  # the first row that has any
        full = max(first, min(rows, keys - distance - 1))  # the first that has all
        if first >= rows:
            return 0
        ramp = full - first
        return ramp * (first + distance + 1) + ramp * (ramp - 1) // 2 + (rows - full) * keys

    if rows <= 0 or keys <= 0 or left + right < 0:
        return 0
    return up_to(min(right, rows + keys)) - up_to(max(-left - 1, -rows - keys))


def _cut(begin: int, end: int, documents: Sequence[int]) -> Iterator[tuple[int, Run]]:
    document = max(bisect.bisect_right(documents, begin) - 1, 0)
    while begin < end and document + 1 < len(documents):
        stop = min(end, documents[document + 1])
        if begin < stop and documents[document] <= begin:
            yield document, (begin, stop)
            begin = stop
        document += 1


@lru_cache(maxsize=64)
def _by_document(runs: Runs, documents: Sequence[int] | None) -> dict[int, list[Piece]]:
    """The pieces of runs, which nobody changes: a count of what methods take asks for those of the same runs often."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces_of(runs, documents):
        found.setdefault(piece.document, []).append(piece)
    return found


def _in_order(runs: Runs, documents: Sequence[int] | None, band: Band) -> Iterator[Part]:
    """A rank's rows over its own keys, where gaps do not matter: a sequence for each document."""
    window = None if band.right else (None, 0)
    for document, pieces in _by_document(runs, documents).items():
        last = pieces[-1]
        lies = pieces[0].first, last.first + last.run[1] - last.run[0]
        yield Part(document, lies, lies, tuple(piece.run for piece in pieces), window)


def _pairs(rows: Runs, keys: Runs, band: Band, documents: Sequence[int] | None, aligned: int) -> list[Part]:
    """Each run of rows over each run of keys, without what sees nothing and is not seen, but for up to `aligned` - 1 of
    each before the first."""
    of_rows, of_keys, found = _by_document(rows, documents), _by_document(keys, documents), []
    # Two ranks have rows of few documents in common, of however many each has.
    pieces = [q for document in of_rows.keys() & of_keys.keys() for q in of_rows[document]]
    for q in sorted(pieces, key=lambda q: q.first):
        for k in of_keys[q.document]:
            begin, end = band.keys(q.run)
            seen = max(_down(begin - k.run[0], aligned) + k.run[0], k.run[0]), min(end, k.run[1])
            begin, end = band.rows(seen)
            seeing = max(_down(begin - q.run[0], aligned) + q.run[0], q.run[0]), min(end, q.run[1])
            if seen[0] >= seen[1] or seeing[0] >= seeing[1]:
                continue
            lies, reads = (_moved(run, piece.first - piece.run[0]) for piece, run in ((q, seeing), (k, seen)))
            origin = documents[q.document] if documents is not None else 0
            found.append(
                Part(
                    *(q.document, lies, reads, (seeing,), band.within(seeing, seen)),
                    place=(seeing[0] - origin, seen[0] - origin),
                    ahead=band.shift + seeing[1] - seen[1],
                )
            )
    return found


def _down(x: int, multiple: int) -> int:
    return x // multiple * multiple


def _moved(run: Run, by: int) -> Run:
    return run[0] + by, run[1] + by


def _merged(sequences: list[Part]) -> list[Part]:
    """Neighbours that see all of the same keys as one, and then those whose keys are neighbours, too."""
    for side in "rows", "keys":
        joined: list[Part] = []
        for x in sorted(sequences, key=lambda x: (x.keys, x.rows) if side == "rows" else (x.rows, x.keys)):
            last = joined[-1] if joined else None
            if last and last.document == x.document and last.window is None and x.window is None:
                if side == "rows" and last.keys == x.keys and last.rows[1] == x.rows[0]:
                    joined[-1] = last._replace(rows=(last.rows[0], x.rows[1]), runs=last.runs + x.runs)
                    continue
                if side == "keys" and last.rows == x.rows and last.keys[1] == x.keys[0]:
                    joined[-1] = last._replace(keys=(last.keys[0], x.keys[1]))
                    continue
            joined.append(x)
        sequences = joined
    return sequences


def _packed(sequences: list[Part], tell_apart: bool) -> list[Call]:
    """As few calls as may be, each of a ragged batch, of sequences that share neither rows nor keys, with others in
    between that have no rows or no keys. All of a call have the same window, and if `tell_apart` the same `ahead`."""
    calls: list[Call] = []
    rest = sorted(sequences, key=lambda x: (x.rows, x.keys))
    while rest:
        kind = _kind(rest[0], tell_apart)
        taken: list[Part] = []
        left: list[Part] = []
        for x in rest:
            after = not taken or (x.rows[0] >= taken[-1].rows[1] and x.keys[0] >= taken[-1].keys[1])
            (taken if _kind(x, tell_apart) == kind and after else left).append(x)
        calls.append(Call(tuple(_without_gaps(taken))))
        rest = left
    return calls


def _kind(x: Part, tell_apart: bool) -> tuple[object, int]:
    return x.window, x.ahead if tell_apart else 0


def _without_gaps(sequences: Sequence[Part], ends: tuple[int, int] | None = None) -> Iterator[Part]:
    """With others in between, and up to the `ends` of rows and keys, that have no rows or no keys."""
    begins = [(x.rows[0], x.keys[0]) for x in sequences[1:]]
    for x, following in itertools.zip_longest(sequences, [*begins, *([ends] if ends else [])]):
        yield x
        row, key = x.rows[1], x.keys[1]
        next_row, next_key = following or (row, key)
        if row < next_row:
            yield Part(-1, (row, next_row), (key, key), (), x.window)
        if key < next_key:
            yield Part(-1, (next_row, next_row), (key, next_key), (), x.window)
