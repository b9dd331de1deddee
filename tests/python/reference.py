"""The formula, written plainly: the oracle of every test. Differentiable, in any dtype, on any device."""

import math

import torch


def visible(seqlen_q, seqlen_k, causal=False, window=None, device="cpu"):
    """(S_q, S_k) bool: which column each row sees. The last row meets the last column on the diagonal."""
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    distance = torch.arange(seqlen_k, device=device)[None, :] - diagonal
    left, right = window or (None, None)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def attention(
    q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, alibi_slopes=None, dtype=torch.float64, rows=None
):
    """(out, lse) of flashtile.attention, every step computed in `dtype`; only query rows `rows` if given."""
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // max(k.shape[2], 1)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[3])
    seen = visible(seqlen_q, seqlen_k, causal, window, q.device)
    distance = torch.arange(seqlen_k, device=q.device) - torch.arange(seqlen_q, device=q.device)[:, None]
    distance = (distance - (seqlen_k - seqlen_q)).abs()
    if rows is not None:
        q, seen, distance = q[:, rows], seen[rows], distance[rows]

    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = (q * scale).permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1)  # (B, H_q, S_q, S_k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype).reshape(-1, scores.shape[1], 1, 1)  # (1 or B, H_q, 1, 1)
        scores = scores - slopes * distance.to(dtype)

    # Rows that see nothing go through softmax unmasked, so that no NaN arises, and are set to zero after it.
    blind = ~seen.any(dim=1)
    scores = scores.masked_fill(~(seen | blind[:, None]), -math.inf)
    weights = scores.softmax(dim=3).masked_fill(blind[:, None], 0)
    lse = scores.logsumexp(dim=3).masked_fill(blind, -math.inf)
    return (weights @ v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3), lse
