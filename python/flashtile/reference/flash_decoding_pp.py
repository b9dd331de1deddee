"""Rung 5: FlashDecoding++'s softmax with a unified maximum, and its fallback.

FlashDecoding++ (Hong et al. 2023, arXiv:2311.01282), section 3. The maximum is subtracted only to keep exp in range,
and softmax is the same whatever is subtracted. So all splits take one number φ that is known beforehand:

    O_s = Σ_j exp(s_j − φ) v_j        l_s = Σ_j exp(s_j − φ)        O = Σ_s O_s / Σ_s l_s

No maximum, no correction of O at every tile, and the merge is a sum. It holds while a < s_j − φ < b; a row with a score
outside is computed again with the online softmax. φ, a and b come from a model's statistics; here φ = 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtile.bench.cases import Case
from flashtile.reference import flash2, flash_decoding
from flashtile.reference._tiles import (
    columns_seen,
    grouped,
    heads_last,
    load,
    score_scale,
    scores,
    store,
    tiles,
    weighted,
)

UNIFIED_MAXIMUM = 0.0  # φ
# (a, b): exp of it, times a sum over a billion keys, is far inside float32's range from 1e-38 to 3e38.
RANGE = (-60.0, 60.0)


@torch.no_grad()
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Arguments and result as :func:`flashtile.reference.standard.attention`; forward only.

    Rows with a score outside RANGE, relative to UNIFIED_MAXIMUM, are computed by rung 3.

    >>> import torch
    >>> from flashtile.reference import flash_decoding_pp, standard
    >>> q, k, v = torch.randn(1, 1, 2, 16), *torch.randn(2, 1, 1000, 2, 16)
    >>> torch.allclose(flash_decoding_pp.attention(q, k, v), standard.attention(q, k, v), atol=1e-5)
    True
    """
    q_grouped, factor = grouped(q, k), score_scale(q, scale)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    fallback = None
    for rows in tiles(0, q.shape[1]):
        # Stored and read again, as a thread block's results are; the merge is a sum.
        parts = [
            tuple(load(store(x)) for x in _sweep(q_grouped, k, v, rows, split, causal, factor))
            for split in flash_decoding.splits(k.shape[1])
        ]
        if not parts:
            continue
        o, total = (sum(column) for column in zip(*parts, strict=True))
        found = heads_last(o / torch.where(total > 0, total, 1)).to(q.dtype)
        outside = heads_last(total.isinf())  # (B, rows, H_q, 1)
        if outside.any():
            fallback = flash2.attention(q, k, v, causal=causal, scale=scale) if fallback is None else fallback
            found = torch.where(outside, fallback[:, rows], found)
        out[:, rows] = store(found)
    return out


def _sweep(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Numerator and sum of `rows` over `columns` relative to φ. The sum is inf where a score is out of range."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    q_i = load(q[:, rows]) * scale
    o = q_i.new_zeros(*q.shape[:1], *q.shape[2:4], q_i.shape[1], v.shape[3])
    total = torch.zeros_like(o[..., :1])
    end = min(columns.stop, columns_seen(rows, seqlen_q, seqlen_k, causal))
    for tile in tiles(columns.start, end):
        s = scores(q_i, load(k[:, tile]), rows, tile, seqlen_k - seqlen_q, causal) - UNIFIED_MAXIMUM
        p = torch.exp(s)
        inside = ((s > RANGE[0]) & (s < RANGE[1])) | (s == -math.inf)  # −inf: hidden
        o = o + weighted(p, load(v[:, tile]))
        total = total + torch.where(inside, p, math.inf).sum(dim=-1, keepdim=True)
    return o, total


def bytes_moved(case: Case) -> int:
    """As Flash-Decoding's, with l_s in the place of lse_s, if no row falls back."""
    return flash_decoding.bytes_moved(case)
