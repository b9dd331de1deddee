"""Results over parts of the keys, put together in one pass: the online softmax over calls, and sums of gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _C
from .._options import SCORES

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
        """Adds the results (B, n, H, D_v) and (2, B, H, n) of the rows [begin, end) over further keys."""
        if len(self.waiting) == _MOST:
            self._fold()
        self.waiting.append((begin, end, out, state))

    def add_sinks(self, sinks: Tensor, rows: int) -> None:
        """Adds a logit for each head, which no value belongs to, to the first `rows` rows."""
        logits, most = sinks.double(), torch.finfo(torch.float32).max
        reference = (logits / self.unit).clamp(-most, most).float()
        log2_sum = ((logits - reference.double() * self.unit) * math.log2(math.e)).float()
        batch, _, heads, head_dim_v = self.shape
        state = torch.stack([reference, log2_sum])[:, None, :, None].expand(2, batch, heads, rows)
        self.add(0, rows, self.q.new_zeros(head_dim_v).expand(batch, rows, heads, head_dim_v), state)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, state), in which rows that saw nothing are 0 and -inf."""
        if self.total is not None:
            self._fold()
            out, state = self.total
        elif len(self.waiting) == 1 and self.waiting[0][:2] == (0, self.shape[1]):
            _, _, out, state = self.waiting[0]
        else:
            out, state = self._merged(self.q.dtype)
        return out.to(self.q.dtype), torch.add(state[1] * math.log(2), state[0], alpha=self.unit), state

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
    when they are added: it may write to those of float32, and return one."""

    def __init__(self, like: Tensor):
        self.like = like
        self.waiting: dict[torch.dtype, list[tuple[int, int, Tensor, None]]] = {}
        self.total: Tensor | None = None  # of what was summed, in float32

    def add(self, begin: int, end: int, x: Tensor) -> None:
        """Adds `x` (B, n, H, D), of any dtype, to the rows [begin, end)."""
        waiting = self.waiting.setdefault(x.dtype, [])
        if len(waiting) == _MOST:
            self._fold(x.dtype)
        waiting.append((begin, end, x, None))

    def finish(self, dtype: torch.dtype) -> Tensor:
        """The sum, 0 where nothing was added."""
        kinds = [kind for kind, waiting in self.waiting.items() if waiting]
        if self.total is None and len(kinds) < 2:
            waiting = self.waiting[kinds[0]] if kinds else []
            if len(waiting) == 1 and self._is_whole(waiting[0]):
                return waiting[0][2].to(dtype)
            return self._summed(waiting, dtype)
        for kind in sorted(kinds, key=lambda kind: kind != torch.float32):
            self._fold(kind)
        assert self.total is not None
        return self.total.to(dtype)

    def parts(self) -> list[tuple[int, int, Tensor]]:
        """What was added, unless it was so much that some of it is summed already."""
        assert self.total is None
        return [part[:3] for waiting in self.waiting.values() for part in waiting]

    def _fold(self, kind: torch.dtype) -> None:
        waiting = self.waiting[kind]
        if self.total is None and kind == torch.float32 and self._is_whole(waiting[0]):
            self.total = waiting.pop(0)[2]
        if self.total is None:
            self.total = self._summed(waiting, torch.float32)
        elif waiting:
            _C.merge(self.total, None, waiting, 1.0, True)
        waiting.clear()

    def _is_whole(self, part: tuple[int, int, Tensor, None]) -> bool:
        return part[:2] == (0, self.like.shape[1])

    def _summed(self, parts: list[tuple[int, int, Tensor, None]], dtype: torch.dtype) -> Tensor:
        out = self.like.new_empty(self.like.shape, dtype=dtype)
        _C.merge(out, None, parts or [_nothing(out, None)], 1.0, False)
        return out


def _nothing(out: Tensor, state: Tensor | None):
    """A part of no rows."""
    return 0, 0, out[:, :0], None if state is None else state[..., :0]


def unit_of(options: tuple, head_dim: int) -> float:
    """The unit of scores, as kernels have it."""
    scale = options[_PLACE["scale"]]
    alibi = options[_PLACE["alibi_slopes"]] is not None
    return _C.unit_of_scores(1 / math.sqrt(head_dim) if scale is None else scale, options[_PLACE["softcap"]], alibi)
