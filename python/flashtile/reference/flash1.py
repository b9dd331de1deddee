"""Rung 2: FlashAttention-1. Tiles and an online softmax: S and P never reach HBM.

Algorithm 1 of FlashAttention (Dao et al. 2022, arXiv:2205.14135). The outer loop takes K and V tile by tile, the inner
one all tiles of Q. A row's softmax so far is its maximum m, its sum l and its result O, normalised; for scores s of one
more tile

    m'   = max(m, max s)
    l'   = exp(m − m') l + Σ exp(s − m')
    O'   = (exp(m − m') l O + exp(s − m') V) / l'

which is exact, for all of the softmax is taken relative to m'. O, l and m live in HBM: each tile of K and V reads and
writes them once for all rows. The online softmax is Milakov and Gimelshein's (2018, arXiv:1805.02867).
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
    row_tiles_seeing,
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
    >>> from flashtile.reference import flash1, standard
    >>> q, k, v = torch.randn(3, 1, 300, 2, 16)
    >>> torch.allclose(flash1.attention(q, k, v), standard.attention(q, k, v), atol=1e-5)
    True
    """
    scale, seqlen_q, seqlen_k = score_scale(q, scale), q.shape[1], k.shape[1]
    q_grouped = grouped(q, k)
    sizes = q.shape[0], k.shape[2], q_grouped.shape[3], seqlen_q
    dtype, device = torch.promote_types(q.dtype, torch.float32), q.device
    out = store(torch.zeros(*sizes, v.shape[3], dtype=dtype, device=device))  # (B, H_k, G, S_q, D_v)
    sums = store(torch.zeros(*sizes, 1, dtype=dtype, device=device))
    tops = store(torch.full((*sizes, 1), LOWEST, dtype=dtype, device=device))

    for columns in tiles(0, seqlen_k):
        k_j, v_j = load(k[:, columns]), load(v[:, columns])
        for rows in tiles(0, seqlen_q):
            if columns_seen(rows, seqlen_q, seqlen_k, causal) <= columns.start:
                continue  # the diagonal is left of this tile
            q_i = load(q_grouped[:, rows]) * scale
            o, total, top = (load(x[..., rows, :]) for x in (out, sums, tops))
            s = scores(q_i, k_j, rows, columns, seqlen_k - seqlen_q, causal)
            new_top = torch.maximum(top, s.amax(dim=-1, keepdim=True))
            p = torch.exp(s - new_top)
            old_total = torch.exp(top - new_top) * total
            new_total = old_total + p.sum(dim=-1, keepdim=True)
            # new_total is 0 only where a row has seen nothing yet, and then so is the numerator.
            numerator = old_total * o + weighted(p, v_j)
            out[..., rows, :] = store(numerator / torch.where(new_total > 0, new_total, 1))
            sums[..., rows, :] = store(new_total)
            tops[..., rows, :] = store(new_top)
    return heads_last(out).to(q.dtype)


def bytes_moved(case: Case) -> int:
    """K and V once; Q read, and O, l and m read and written, for every tile of K and V. O is float32 here."""
    state = (case.head_dim_v + 2) * STATE_BYTES
    passes = case.head_dim * case.torch_dtype.itemsize + 2 * state  # of a row, for one tile of K and V
    seen = sum(
        rows.stop - rows.start for columns in tiles(0, case.seqlen_k) for rows in row_tiles_seeing(case, columns)
    )
    rows_in_all = case.batch * case.heads_q
    return rows_in_all * (case.seqlen_q * state + seen * passes) + case.seqlen_k * key_row_bytes(case)
