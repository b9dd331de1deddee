"""flash-attn's terms: what the tests of flashtile.compat have in common."""

import math

import pytest
import reference
import torch
from cases import F32, Case

from flashtile.compat import flash_attn as fa2
from flashtile.compat import flash_attn_interface as fa3

of_each_module = pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
SMALL = Case("small", dtype=F32, head_dim=16, seqlen_q=20, seqlen_k=20, heads_q=2, heads_k=2)

NAMES = {"scale": "softmax_scale", "leftpad": "cache_leftpad", "k_new": "k", "v_new": "v"}


def in_their_terms(options):
    """Keyword arguments of flashtile as flash-attn calls and writes them; dropout's seed comes from the generator."""
    options = {NAMES.get(name, name): x for name, x in options.items() if name != "seed"}
    left, right = options.pop("window", None) or (None, None)
    return options | {"window_size": (-1 if left is None else left, -1 if right is None else right)}


def packed(*tensors):
    return torch.stack(tensors, dim=-3)


def assert_refuses(function, error, message, *args, name=None, **options):
    """Messages are of one line, whatever was given."""
    with pytest.raises(error, match=f"^{name or function.__name__}: {message}") as raised:
        function(*args, **options)
    assert raised.type is error
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400


def seen_in_chunks(seqlen_q, seqlen_k, chunk, causal=False, window=None, device="cpu"):
    """(S_q, S_k) bool: which column each row sees, by the words of FlashAttention-3's attention_chunk; 0 for none."""
    seen = reference.visible(seqlen_q, seqlen_k, causal, window, device)
    if chunk == 0:
        return seen
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    return seen & (torch.arange(seqlen_k, device=device) // chunk == diagonal // chunk)


def attend_seen(q, k, v, seen, scale=None, softcap=0.0, dtype=torch.float64):
    """(out, lse) of one sequence, q (S_q, H_q, D), k (S_k, H_k, D), v (S_k, H_k, D_v), by the formula."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.to(dtype).transpose(0, 1) @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    blind = ~seen.any(-1)
    scores = scores.masked_fill(~(seen | blind[:, None]), -math.inf)
    out = scores.softmax(-1).masked_fill(blind[:, None], 0) @ v
    return out.transpose(0, 1), scores.logsumexp(-1).masked_fill(blind, -math.inf)
