"""The formula, written plainly: the oracle of every test. Differentiable, in any dtype, on any device."""

import math

import torch


def visible(seqlen_q, seqlen_k, causal=False, window=None, device="cpu", rows=None):
    """(S_q, S_k) bool, or that of `rows` alone: which column each row sees. The last row meets the last column on the
    diagonal."""
    row = torch.arange(seqlen_q, device=device) if rows is None else rows
    diagonal = row[:, None] + (seqlen_k - seqlen_q)
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


def _philox(counter, key):
    """Philox 4×32-7: the four words of `counter`, four int64 tensors that broadcast, under `key`, two ints."""
    low = 0xFFFFFFFF
    for i in range(7):
        # Products wrap around at 2^64, which leaves all their bits.
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        k0, k1 = (key[0] + i * 0x9E3779B9) & low, (key[1] + i * 0xBB67AE85) & low
        counter = ((b >> 32 & low) ^ counter[1] ^ k0, b & low, (a >> 32 & low) ^ counter[3] ^ k1, a & low)
    return counter


def dropout_threshold(p):
    """The number below which a weight's random byte drops it: `p` in units of 1/256, which are what may be had."""
    return min(max(math.floor(p * 256 + 0.5), 1), 255) if p > 0 else 0


def dropout_factors(batch, heads, rows, columns, p, seed, entry=0):
    """(batch, heads, rows, columns): 0 where a weight is dropped, elsewhere what it is multiplied with."""
    h, b = (torch.arange(n, device=rows.device) for n in (heads, batch))
    b, h, i, j = b[:, None, None, None] + entry, h[:, None, None], rows[:, None], columns
    words = torch.stack(torch.broadcast_tensors(*_philox((i & ~9, j & ~9, h, b), (seed & 0xFFFFFFFF, seed >> 32))))
    mine = ((i & 1) + 2 * (j & 1)).expand(words.shape[1:])
    place = 8 * ((i >> 3 & 1) + 2 * (j >> 3 & 1))
    drop_below = dropout_threshold(p)
    return ((words.gather(0, mine[None])[0] >> place & 0xFF) >= drop_below) * (256 / (256 - drop_below))


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    seed=None,
    dtype=torch.float64,
    rows=None,
    entry=0,
    mask=None,
):
    """(out, lse) of flashtile.attention, every step computed in `dtype`; only query rows `rows` if given. The first
    batch entry has the number `entry`, by which dropout goes. `mask` is bool, (1 or B, H, S_q, S_k), where H divides
    H_q: what rows see at the most."""
    seqlen_k, group = k.shape[1], q.shape[2] // max(k.shape[2], 1)
    options = dict(causal=causal, window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, mask=mask)
    seen, scores = seen_scores(q, k, dtype=dtype, rows=rows, **options)
    if sinks is not None:  # one more column, that every row sees and whose value is 0
        sinks = sinks.to(dtype)[:, None, None].expand(-1, scores.shape[2], 1)
        given = sinks > -math.inf
        seen = torch.cat([seen.expand(scores.shape), given.expand(len(q), -1, -1, -1)], dim=3)
        scores = torch.cat([scores, sinks.masked_fill(~given, 0).expand(len(q), -1, -1, -1)], dim=3)

    # Rows that see nothing go through softmax unmasked, so that no NaN arises, and are set to zero after it.
    blind = ~seen.any(dim=-1)
    scores = scores.masked_fill(~(seen | blind[..., None]), -math.inf)
    weights = scores.softmax(dim=3).masked_fill(blind[..., None], 0)[..., :seqlen_k]
    lse = scores.logsumexp(dim=3).masked_fill(blind, -math.inf)
    if dropout_p > 0:
        row, column = torch.arange(q.shape[1], device=q.device), torch.arange(seqlen_k, device=q.device)
        row = row if rows is None else row[rows]
        weights = weights * dropout_factors(*scores.shape[:2], row, column, dropout_p, seed, entry).to(dtype)
    v = v.to(dtype).repeat_interleave(group, dim=2)
    return (weights @ v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3), lse


def seen_scores(
    q, k, *, causal=False, window=None, scale=None, softcap=0.0, alibi_slopes=None, mask=None, rows=None, dtype
):
    """(seen, scores) of attention: which columns each row sees, bool, of a shape that broadcasts to that of all scores,
    (B, H_q, S_q, S_k)."""
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // max(k.shape[2], 1)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[3])
    seen = visible(seqlen_q, seqlen_k, causal, window, q.device, rows)
    row, column = torch.arange(seqlen_q, device=q.device), torch.arange(seqlen_k, device=q.device)
    if rows is not None:
        q, row = q[:, rows], row[rows]
    distance = (column - row[:, None] - (seqlen_k - seqlen_q)).abs()
    if mask is not None:
        mask = mask.repeat_interleave(q.shape[2] // mask.shape[1], dim=1)
        seen = seen & (mask if rows is None else mask[:, :, rows])

    q, k = q.to(dtype), k.to(dtype).repeat_interleave(group, dim=2)
    scores = (q * scale).permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1)  # (B, H_q, S_q, S_k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype).reshape(-1, scores.shape[1], 1, 1)  # (1 or B, H_q, 1, 1)
        scores = scores - slopes * distance.to(dtype)
    return seen, scores


def max_logits(q, k, *, dtype=torch.float64, **options):
    """That of flashtile.max_logits."""
    seen, scores = seen_scores(q, k, dtype=dtype, **options)
    if 0 in scores.shape[2:]:
        return scores.new_full(scores.shape[:2], -math.inf)
    return scores.masked_fill(~seen, -math.inf).amax(dim=(2, 3))
