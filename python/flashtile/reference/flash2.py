"""Rung 3: FlashAttention-2. The loops change places, so O stays in registers, and it is divided once.

FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 1. The outer loop takes tiles of Q, each of which a thread
block could do alone; the inner one runs over K and V. With the maximum m, the sum l and the numerator O of a row, all
in registers, and scores s of one more tile

    m'   = max(m, max s)
    l'   = exp(m − m') l + Σ exp(s − m')
    O'   = exp(m − m') O + exp(s − m') V

and behind the last tile O / l is the result. Nothing but that is written; K and V are read once for each tile of Q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.bench.cases import Case
from flashtile.reference._tiles import (
    LOWEST,
    columns_seen,
    grouped,
    heads_last,
    key_row_bytes,
    key_rows_swept,
    load,
    out_bytes,
    query_bytes,
    score_scale,
    scores,
    store,
    tiles,
    weighted,
)


@torch.no_grad()
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Arguments and result as :func:`flashtile.reference.standard.attention`; forward only.

    >>> import torch
    >>> from flashtile.reference import flash2, standard
    >>> q, k, v = torch.randn(3, 1, 300, 2, 16)
    >>> torch.allclose(flash2.attention(q, k, v), standard.attention(q, k, v), atol=1e-5)
    True
    """
    q_grouped, scale = grouped(q, k), score_scale(q, scale)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for rows in tiles(0, q.shape[1]):
        o, _, total = sweep(q_grouped, k, v, rows, slice(0, k.shape[1]), causal, scale)
        out[:, rows] = store(heads_last(o / torch.where(total > 0, total, 1)).to(q.dtype))
    return out


def sweep(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The inner loop: numerator O (B, H_k, G, rows, D_v), maximum m and sum l (…, 1) of `rows` over `columns`.

    q is (B, S_q, H_k, G, D). A row that sees none of the columns has O = l = 0.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    q_i = load(q[:, rows]) * scale
    o = q_i.new_zeros(*q.shape[:1], *q.shape[2:4], q_i.shape[1], v.shape[3])
    top, total = torch.full_like(o[..., :1], LOWEST), torch.zeros_like(o[..., :1])
    end = min(columns.stop, columns_seen(rows, seqlen_q, seqlen_k, causal))
    for tile in tiles(columns.start, end):
        s = scores(q_i, load(k[:, tile]), rows, tile, seqlen_k - seqlen_q, causal)
        new_top = torch.maximum(top, s.amax(dim=-1, keepdim=True))
        p, correction = torch.exp(s - new_top), torch.exp(top - new_top)
        o = correction * o + weighted(p, load(v[:, tile]))
        total = correction * total + p.sum(dim=-1, keepdim=True)
        top = new_top
    return o, top, total


def bytes_moved(case: Case) -> int:
    """Q and O once; K and V, as far as they are seen, for every tile of Q."""
    return query_bytes(case) + key_rows_swept(case) * key_row_bytes(case) + out_bytes(case)
