"""S_dmask: the matrix of weights, which flash-attn 2 returns to those who ask for it where weights are dropped."""

import torch

from .._core import WIDEST
from ..varlen import attention_varlen
from ._common import attend, integer
from ._rotation import positions_of

_MOST = 2**27  # elements: a larger matrix is not worth its memory, and none is formed
_STEP = 128  # to multiples of which flash-attn pads both sides


@torch.no_grad()
def signed_weights(function, q, k, max_seqlen_q, max_seqlen_k, dropout_p, seed, *, alibi_slopes, softcap, **options):
    """S_dmask of a ragged call, with its tables among the options: (B, H_q, S_q, S_k) of q's dtype, S_q and S_k rounded
    up to multiples of 128. It holds the weights before dropout, negative where one is dropped, and 0 where there is
    none; no element where it would have more than 2^27.

    A row of it is what attention gives over values that are the rows of an identity.
    """
    longest = dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    rows, columns = (-(-integer(function, name, n) // _STEP) * _STEP for name, n in longest.items())
    cu_seqlens_q, cu_seqlens_k = options["cu_seqlens_q"], options["cu_seqlens_k"]
    batch, heads = cu_seqlens_q.shape[0] - 1, q.shape[1]
    if batch * heads * rows * columns > _MOST:
        return q.new_empty(0)
    row, column = positions_of(q, 0, cu_seqlens_q), positions_of(k, 0, cu_seqlens_k)
    nothing = torch.zeros_like(q), torch.zeros_like(k)  # all scores are alike, so that no weight vanishes by rounding
    found = []
    for begin in range(0, columns, WIDEST):  # a call gives as many columns as values may be wide
        named = torch.arange(begin, min(begin + WIDEST, columns), device=k.device)
        v = (column[:, None] == named)[:, None].expand(-1, k.shape[1], -1).to(q.dtype)
        weights = attend(function, attention_varlen, q, k, v, alibi_slopes=alibi_slopes, softcap=softcap, **options)
        kept = attend(function, attention_varlen, *nothing, v, dropout_p=dropout_p, seed=seed, softcap=0.0, **options)
        found.append(torch.where(kept > 0, weights, -weights))
    # Rows that are in no sequence, or behind its max_seqlen_q, go to one that is cut off.
    sequence = torch.searchsorted(
        cu_seqlens_q[1:], torch.arange(len(q), dtype=torch.int32, device=q.device), right=True
    )
    sequence = sequence.where(row < rows, batch)
    weights = torch.cat(found, -1) if found else q.new_empty(*q.shape[:2], 0)
    matrix = weights.new_zeros(batch + 1, max(rows, 1), heads, columns)
    matrix[sequence, row.clamp(max=rows - 1)] = weights
    return matrix[:batch, :rows].transpose(1, 2)
