"""Rung 1: standard attention, as in the textbook.

S = scale · Q Kᵀ, P = softmax(S) row by row, O = P V. Each of the three steps writes its result to HBM and the next one
reads it again, so S and P, S_q × S_k numbers a head, travel four times. This is Algorithm 0 of FlashAttention (Dao et
al. 2022, arXiv:2205.14135); the formula is Vaswani et al. 2017 (arXiv:1706.03762).
"""

from __future__ import annotations

from torch import Tensor

from flashtile.bench.cases import Case
from flashtile.reference._tiles import (
    LOWEST,
    STATE_BYTES,
    grouped,
    heads_last,
    key_row_bytes,
    load,
    out_bytes,
    query_bytes,
    score_scale,
    scores,
    store,
    weighted,
)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Attention that stores S and P. Its backward is autograd's, which keeps P.

    Args:
        q: (B, S_q, H_q, D), float16, bfloat16, float32 or float64; computed in float32, or float64.
        k: (B, S_k, H_k, D). H_q is a multiple of H_k; query head h reads KV head h // (H_q / H_k).
        v: (B, S_k, H_k, D_v).
        causal: hide column j from row i where j > i + S_k - S_q; a row that sees nothing gives 0.
        scale: factor of the scores; by default 1/√D.

    Returns:
        (B, S_q, H_q, D_v), of q's dtype.

    >>> import torch
    >>> from flashtile.reference import standard
    >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
    >>> bool((standard.attention(q, k, v, causal=True)[:, 0] == v[:, 0]).all())  # row 0 sees column 0 alone
    True
    """
    rows, columns, diagonal = slice(0, q.shape[1]), slice(0, k.shape[1]), k.shape[1] - q.shape[1]
    q_scaled = load(grouped(q, k)) * score_scale(q, scale)
    s = store(scores(q_scaled, load(k), rows, columns, diagonal, causal, hidden=LOWEST))
    p = load(s).softmax(dim=-1)
    if causal:  # a row that sees nothing has equal weights here, and must have none
        p = p.masked_fill(s == LOWEST, 0)
    return store(heads_last(weighted(load(store(p)), load(v))).to(q.dtype))


def bytes_moved(case: Case) -> int:
    """Q, K, V and O once; S and P each written once and read once."""
    s = case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * STATE_BYTES
    return query_bytes(case) + case.seqlen_k * key_row_bytes(case) + 4 * s + out_bytes(case)
