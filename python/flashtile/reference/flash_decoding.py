"""Rung 4: Flash-Decoding. One query has one tile of rows, so the keys are what is shared out.

Flash-Decoding (Dao, Haziza, Massa, Sizov 2023, pytorch.org/blog/flash-decoding). Each split of the keys is attended
to by itself, as in FlashAttention-2, and leaves its normalised result O_s and lse_s = m_s + log l_s in HBM. A second
step merges

    lse = log Σ_s exp(lse_s)          O = Σ_s exp(lse_s − lse) O_s

The splits need nothing of each other, so as many thread blocks can read the cache as there are splits. Here they are a
loop; their traffic is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.bench.cases import Case
from flashtile.reference._tiles import (
    LOWEST,
    STATE_BYTES,
    columns_seen,
    grouped,
    heads_last,
    key_row_bytes,
    load,
    out_bytes,
    query_bytes,
    score_scale,
    store,
    tiles,
)
from flashtile.reference.flash2 import sweep

NUM_SPLITS = 8


@torch.no_grad()
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Arguments and result as :func:`flashtile.reference.standard.attention`; forward only.

    >>> import torch
    >>> from flashtile.reference import flash_decoding, standard
    >>> q, k, v = torch.randn(1, 1, 2, 16), *torch.randn(2, 1, 1000, 2, 16)  # one query over 1000 keys
    >>> torch.allclose(flash_decoding.attention(q, k, v), standard.attention(q, k, v), atol=1e-5)
    True
    """
    q_grouped, scale = grouped(q, k), score_scale(q, scale)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for rows in tiles(0, q.shape[1]):
        parts = []
        for split in splits(k.shape[1]):  # every one a thread block of its own
            o, top, total = sweep(q_grouped, k, v, rows, split, causal, scale)
            parts.append((store(o / torch.where(total > 0, total, 1)), store(top + torch.log(total))))
        if parts:
            out[:, rows] = store(heads_last(merge(parts)).to(q.dtype))
    return out


def splits(seqlen_k: int) -> list[slice]:
    """The keys in at most NUM_SPLITS parts of equal length."""
    return tiles(0, seqlen_k, max(1, -(-seqlen_k // NUM_SPLITS)))


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The result over all keys from (O, lse) over parts of them; a part that sees nothing has lse = −inf."""
    o, lse = (torch.stack([load(x) for x in column]) for column in zip(*parts, strict=True))
    top = lse.amax(dim=0).clamp(min=LOWEST)  # a row that sees nothing in any part: weights 0, not NaN
    weights = torch.exp(lse - top)
    total = weights.sum(dim=0)
    return (weights * o).sum(dim=0) / torch.where(total > 0, total, 1)


def bytes_moved(case: Case) -> int:
    """K and V for every tile of Q, Q for every split; O_s and lse_s written and read; O once."""
    parts = splits(case.seqlen_k)
    # What a tile of Q sees of every split together is what it sees of the keys.
    swept = sum(columns_seen(rows, case.seqlen_q, case.seqlen_k, case.causal) for rows in tiles(0, case.seqlen_q))
    partial = case.batch * case.heads_q * case.seqlen_q * (case.head_dim_v + 1) * STATE_BYTES
    return len(parts) * (query_bytes(case) + 2 * partial) + swept * key_row_bytes(case) + out_bytes(case)
