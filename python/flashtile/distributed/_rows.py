"""Results over parts of the keys, summed up in float32: the online softmax over calls."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _C
from .._options import SCORES

_PLACE = {option.name: i for i, option in enumerate(SCORES)}


class Rows:
    """What is known so far of a rank's query rows.

    A row's softmax is kept as the kernels keep it, a reference and the logarithm of a sum relative to that, of scores
    in a `unit` of their own: an lse of one float32 would be off by units where scores are large.
    """

    def __init__(self, q: Tensor, head_dim_v: int, unit: float):
        batch, rows, heads, _ = q.shape
        self.q, self.unit, self.shape = q, unit, (batch, rows, heads, head_dim_v)
        # The first result as it came, as long as it is the only one and that of all rows; later on float32, our own.
        self.out: Tensor | None = None
        self.state: Tensor | None = None  # (2, B, H, S): reference and log2 of the sum
        self.owned = False

    def add(self, begin: int, end: int, out: Tensor, state: Tensor) -> None:
        """Adds the results (B, S, H, D_v) and (2, B, H, S) of the rows from `begin` to `end` over further keys."""
        if self.out is None and (begin, end) == (0, self.shape[1]):
            self.out, self.state = out, state
        else:
            self._merge(begin, end, out, state)

    def add_sinks(self, sinks: Tensor, rows: int) -> None:
        """Adds a logit for each head, which no value belongs to, to the first `rows` rows."""
        logits, most = sinks.double(), torch.finfo(torch.float32).max
        reference = (logits / self.unit).clamp(-most, most).float()
        log2_sum = ((logits - reference.double() * self.unit) * math.log2(math.e)).float()
        batch, _, heads, head_dim_v = self.shape
        state = torch.stack([reference, log2_sum])[:, None, :, None].expand(2, batch, heads, rows)
        nothing = self.q.new_zeros(head_dim_v, dtype=torch.float32)
        self._merge(0, rows, nothing.expand(batch, rows, heads, head_dim_v), state)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, state)."""
        out, state = (self.out, self.state) if self.out is not None and self.state is not None else self._own()
        return out.to(self.q.dtype), torch.add(state[1] * math.log(2), state[0], alpha=self.unit), state

    def _merge(self, begin: int, end: int, out: Tensor, state: Tensor) -> None:
        total, known = self._own()
        _C.merge(total[:, begin:end], known[..., begin:end], out, state, self.unit, False)

    def _own(self) -> tuple[Tensor, Tensor]:
        """The totals, in float32 memory that is not the caller's."""
        if self.owned and self.out is not None and self.state is not None:
            return self.out, self.state
        batch, rows, heads, _ = self.shape
        out = self.q.new_empty(self.shape, dtype=torch.float32)
        state = self.q.new_empty(2, batch, heads, rows, dtype=torch.float32)
        if self.out is not None:
            _C.merge(out, state, self.out, self.state, self.unit, True)
        else:
            out.zero_(), state[0].zero_(), state[1].fill_(-math.inf)
        self.out, self.state, self.owned = out, state, True
        return out, state


def unit_of(options: tuple, head_dim: int) -> float:
    """The unit of scores, as ScoreMap has it."""
    scale, softcap = options[_PLACE["scale"]], options[_PLACE["softcap"]]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    factor = softcap if 0 < softcap < 2.0**122 else scale
    stretched = options[_PLACE["alibi_slopes"]] is not None or not 0 < factor <= 2.0**124
    return 1.0 if stretched else torch.tensor(factor, dtype=torch.float32).item()


class Sums:
    """A sum of parts of a gradient, in float32."""

    def __init__(self, like: Tensor):
        self.total = torch.zeros_like(like, dtype=torch.float32)

    def add(self, begin: int, end: int, part: Tensor) -> None:
        self.total[:, begin:end] += part

    def finish(self, dtype: torch.dtype) -> Tensor:
        return self.total.to(dtype)
