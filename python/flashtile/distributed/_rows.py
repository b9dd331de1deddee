"""Results over parts of the keys, put together in one pass: the online softmax over calls, and sums of gradients. Where
one part has all rows, the others are added to it where it lies, and rows that only it has are not touched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._options import SCORES

Part = tuple[int, int, Tensor, Tensor | None]  # the first row and the end, a result, its state or None
Kind = tuple[int, int, torch.dtype]  # the same of a gradient that travels

_PLACE = {option.name: i for i, option in enumerate(SCORES)}
_MOST = 8  # parts of a merge


class Rows:
    """What is known of a rank's query rows: results that wait until there are eight more, or no more.

    A row's softmax is kept as the kernels keep it, a reference and the logarithm of a sum relative to that, of scores
    in a `unit` of their own: an lse of one float32 would be off by units where scores are large.
    """

    def __init__(self, q: Tensor, head_dim_v: int, unit: float):
        batch, rows, heads, _ = q.shape
        self.q, self.unit, self.shape = q, unit, (batch, rows, heads, head_dim_v)
        self.waiting: list[tuple[int, int, Tensor, Tensor]] = []
        self.total: tuple[Tensor, Tensor] | None = None  # of what was merged, in float32

    def add(self, begin: int, end: int, out: Tensor, state: Tensor) -> None:
        """Adds the results (B, n, H, D_v) and (2, B, H, n) of the rows [begin, end) over further keys. They are its own
        from then on: it may write to those that are of all rows."""
        if len(self.waiting) == _MOST:
            self._fold()
        self.waiting.append((begin, end, out, state))

    def add_sinks(self, sinks: Tensor, rows: int) -> None:
        """Adds a logit for each head, which no value belongs to, to the first `rows` rows, after all results."""
        logits, most = sinks.double(), torch.finfo(torch.float32).max
        reference = (logits / self.unit).clamp(-most, most).float()
        log2_sum = ((logits - reference.double() * self.unit) * math.log2(math.e)).float()
        batch, _, heads, head_dim_v = self.shape
        state = torch.stack([reference, log2_sum])[:, None, :, None].expand(2, batch, heads, rows)
        self.add(0, rows, self.q.new_zeros(head_dim_v).expand(batch, rows, heads, head_dim_v), state)

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out, state), in which rows that saw nothing are 0 and -inf."""
        if self.total is not None:
            self._fold()
            out, state = self.total
        elif self.waiting and self.waiting[0][:2] == (0, self.shape[1]):
            (_, _, out, state), *others = self.waiting
            for begin, end, parts in meeting(others):
                _C.merge(out[:, begin:end], state[..., begin:end], _counted_from(begin, parts), self.unit, True)
        else:
            out, state = self._merged(self.q.dtype)
        return out.to(self.q.dtype), state

    def lse_of(self, state: Tensor) -> Tensor:
        return torch.add(state[1] * math.log(2), state[0], alpha=self.unit)

    def _fold(self) -> None:
        if self.total is None:
            self.total = self._merged(torch.float32)
        else:
            _C.merge(*self.total, self.waiting, self.unit, True)
        self.waiting = []

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        batch, rows, heads, _ = self.shape
        out = self.q.new_empty(self.shape, dtype=dtype)
        state = self.q.new_empty(2, batch, heads, rows, dtype=torch.float32)
        _C.merge(out, state, self.waiting or [_nothing(out, state)], self.unit, False)
        return out, state


class Sums:
    """A sum of partial gradients of the rows (B, S, H, D) of `like`, in float32, rounded once. Parts are its own from
    when they are added: it may write to them, and return one."""

    def __init__(self, like: Tensor):
        self.like = like
        self.waiting: list[Part] = []

    def add(self, begin: int, end: int, x: Tensor) -> None:
        """Adds `x` (B, n, H, D), of any dtype, to the rows [begin, end)."""
        if len(self.waiting) >= _MOST:
            self.waiting = self.parts()
        self.waiting.append((begin, end, x, None))

    def finish(self, dtype: torch.dtype) -> Tensor:
        """The sum, 0 where nothing was added."""
        return self._sum(0, self.like.shape[1], self.waiting, dtype)

    def parts(self) -> list[Part]:
        """What was added, as it travels: see `kinds_of`."""
        found: list[Part] = []
        for begin, end, parts in meeting(self.waiting):
            apart = _travel_apart([x.dtype for _, _, x, _ in parts])
            found += parts if apart else [(begin, end, self._sum(begin, end, parts, torch.float32), None)]
        return found

    def _sum(self, begin: int, end: int, parts: list[Part], dtype: torch.dtype) -> Tensor:
        """The sum of parts of the rows [begin, end)."""
        whole = next((x for x in parts if x[:2] == (begin, end) and x[2].dtype == dtype), None)
        others = [x for x in parts if x is not whole]
        if whole is None:
            if not _is_rounded_once(others, dtype):
                return self._sum(begin, end, others, torch.float32).to(dtype)
            batch, _, *sizes = self.like.shape
            total = self.like.new_empty(batch, end - begin, *sizes, dtype=dtype)
            _sum_up(total, _counted_from(begin, others), False)
            return total
        for first, last, met in meeting(others):
            if not _is_rounded_once(met, dtype):
                met = [(first, last, self._sum(first, last, met, torch.float32), None)]
            _sum_up(whole[2][:, first - begin : last - begin], _counted_from(first, met), True)
        return whole[2]


def kinds_of(parts: Sequence[Kind]) -> list[Kind]:
    """What `Sums.parts` makes of parts like these: one sum in float32 of those that share rows, but for two of 16 bits,
    whose sum would be no smaller and would have to be made."""
    found: list[Kind] = []
    for begin, end, met in meeting(parts):
        found += met if _travel_apart([dtype for _, _, dtype in met]) else [(begin, end, torch.float32)]
    return found


def _travel_apart(dtypes: Sequence[torch.dtype]) -> bool:
    return len(dtypes) == 1 or (len(dtypes) == 2 and torch.float32 not in dtypes)


def meeting(parts: Sequence[Any]) -> list[tuple[int, int, list[Any]]]:
    """Parts in groups that share no rows, each with its rows [begin, end), in ascending order."""
    groups: list[tuple[int, int, list[Any]]] = []
    for part in sorted(parts, key=lambda x: x[:2]):
        begin, end, *_ = part
        if groups and begin < groups[-1][1]:
            first, last, met = groups.pop()
            groups.append((first, max(last, end), [*met, part]))
        else:
            groups.append((begin, end, [part]))
    return groups


def _counted_from(first: int, parts: Sequence[Part]) -> list[Part]:
    return [(begin - first, end - first, x, state) for begin, end, x, state in parts]


def _batches(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts as merges take them: some of one dtype."""
    of_dtypes: dict[torch.dtype, list[Part]] = {}
    for part in parts:
        of_dtypes.setdefault(part[2].dtype, []).append(part)
    return [of[i : i + _MOST] for of in of_dtypes.values() for i in range(0, len(of), _MOST)]


def _is_rounded_once(parts: Sequence[Part], dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or len(_batches(parts)) <= 1


def _sum_up(total: Tensor, parts: Sequence[Part], adds: bool) -> None:
    """Writes the sum of parts to `total`, or adds it."""
    for batch in _batches(parts or [_nothing(total, None)]):
        _C.merge(total, None, batch, 1.0, adds)
        adds = True


def _nothing(out: Tensor, state: Tensor | None) -> Part:
    """A part of no rows."""
    return 0, 0, out[:, :0], None if state is None else state[..., :0]


def unit_of(options: tuple, head_dim: int) -> float:
    """The unit of scores, as kernels have it."""
    scale = options[_PLACE["scale"]]
    alibi = options[_PLACE["alibi_slopes"]] is not None
    return _C.unit_of_scores(1 / math.sqrt(head_dim) if scale is None else scale, options[_PLACE["softcap"]], alibi)
