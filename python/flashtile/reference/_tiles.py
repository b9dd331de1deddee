"""What the rungs in PyTorch share: traffic by name, the shapes of heads, the mask, and which tiles are seen.

A rung says :func:`load` where a kernel would read from HBM and :func:`store` where it would write there; whatever is in
between would stay in registers or shared memory. :func:`counting` adds up what passes through the two, which is how the
tests check the formulas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile.bench.cases import Case

BLOCK = 128  # rows of Q, and of K and V, in a tile of the rungs in PyTorch
STATE_BYTES = 4  # what a rung keeps for itself (scores, partial sums, maxima) is float32
# A row's maximum before it has seen anything. It is finite, so that the difference of two is never NaN.
LOWEST = torch.finfo(torch.float32).min


@dataclasses.dataclass
class Traffic:
    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written


_counters: list[Traffic] = []


@contextlib.contextmanager
def counting() -> Iterator[Traffic]:
    """Counts the bytes that the rungs in PyTorch load and store.

    >>> import torch
    >>> from flashtile.reference import _tiles, flash2
    >>> q = torch.randn(1, 256, 1, 64)
    >>> with _tiles.counting() as traffic:
    ...     out = flash2.attention(q, q, q)
    >>> traffic.written == out.nbytes
    True
    """
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.pop()


def load(x: Tensor) -> Tensor:
    """x, read from HBM; from here on float32, as in the kernels' accumulators (float64 stays)."""
    for traffic in _counters:
        traffic.read += x.nbytes
    return x.to(torch.promote_types(x.dtype, torch.float32))


def store(x: Tensor) -> Tensor:
    """x, written to HBM."""
    for traffic in _counters:
        traffic.written += x.nbytes
    return x


def grouped(q: Tensor, k: Tensor) -> Tensor:
    """(B, S_q, H_q, D) as (B, S_q, H_k, G, D): the G query heads that read one KV head beside each other."""
    return q.unflatten(2, (k.shape[2], -1))


def score_scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def tiles(begin: int, end: int, block: int = BLOCK) -> list[slice]:
    """[begin, end) in pieces of `block`, the last one shorter where it must be."""
    return [slice(start, min(start + block, end)) for start in range(begin, end, block)]


def columns_seen(rows: slice, seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """How many columns, counted from the left, the last of these rows sees."""
    return min(seqlen_k, max(0, rows.stop + seqlen_k - seqlen_q)) if causal else seqlen_k


def scores(
    q: Tensor, k: Tensor, rows: slice, columns: slice, diagonal: int, causal: bool, hidden: float = -math.inf
) -> Tensor:
    """q kᵀ of a tile, (B, H_k, G, rows, columns); `hidden` where causal hides a column from a row.

    q (B, rows, H_k, G, D) is scaled, k is (B, columns, H_k, D). Row i's diagonal is column i + `diagonal`.
    """
    s = torch.einsum("bqhgd,bkhd->bhgqk", q, k)
    if causal:
        i, j = (torch.arange(part.start, part.stop, device=s.device) for part in (rows, columns))
        s = s.masked_fill(j > i[:, None] + diagonal, hidden)
    return s


def weighted(p: Tensor, v: Tensor) -> Tensor:
    """p (B, H_k, G, rows, columns) times v (B, columns, H_k, D_v): (B, H_k, G, rows, D_v)."""
    return torch.einsum("bhgqk,bkhd->bhgqd", p, v)


def heads_last(o: Tensor) -> Tensor:
    """(B, H_k, G, rows, D_v) as (B, rows, H_q, D_v)."""
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3)


# What the formulas are made of.


def query_bytes(case: Case) -> int:
    """Of Q, once."""
    return case.batch * case.seqlen_q * case.heads_q * case.head_dim * case.torch_dtype.itemsize


def out_bytes(case: Case) -> int:
    """Of the result, once."""
    return case.batch * case.seqlen_q * case.heads_q * case.head_dim_v * case.torch_dtype.itemsize


def key_row_bytes(case: Case) -> int:
    """Of one row of K and one of V, in every KV head of the batch."""
    return case.batch * case.heads_k * (case.head_dim + case.head_dim_v) * case.torch_dtype.itemsize


def row_tiles_seeing(case: Case, columns: slice, block: int = BLOCK) -> list[slice]:
    """The tiles of rows in which a row sees a column of `columns`."""
    found = tiles(0, case.seqlen_q, block)
    return [rows for rows in found if columns_seen(rows, case.seqlen_q, case.seqlen_k, case.causal) > columns.start]


def key_rows_swept(case: Case, block_m: int = BLOCK, block_n: int = 1) -> int:
    """How many rows of K each head reads in all, if every tile of `block_m` rows reads what it sees in `block_n`s."""
    return sum(key_rows_of_tiles(case, block_m, block_n))


def key_rows_of_tiles(case: Case, block_m: int, block_n: int) -> list[int]:
    """How many of these each tile reads."""
    ends = [columns_seen(rows, case.seqlen_q, case.seqlen_k, case.causal) for rows in tiles(0, case.seqlen_q, block_m)]
    return [min(case.seqlen_k, math.ceil(end / block_n) * block_n) for end in ends]
