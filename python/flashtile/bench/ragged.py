"""Ragged batches: what a call of one takes, and who is timed on them."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from flashtile.bench import options
from flashtile.bench.cases import Case
from flashtile.bench.oracle import Attention
from flashtile.bench.peers import OURS, Peer

DENSE, TORCH_VARLEN = "dense", "torch varlen"


def arguments(case: Case, device: torch.device) -> dict[str, Any]:
    """What `flashtile.attention_varlen` and every --peer of suite varlen are called with beside q, k and v."""
    offsets, longest = _offsets_and_longest(case, device)
    return {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": case.causal,
        "scale": 1 / math.sqrt(case.head_dim),
        **options.arguments(case, device),
    }


def _offsets_and_longest(case: Case, device: torch.device) -> tuple[torch.Tensor, int]:
    lengths = case.lengths or ()
    return cu_seqlens(lengths, device), max(lengths, default=0)


@functools.lru_cache(maxsize=8)  # made by a case's check, so that the timed calls copy nothing to the device
def cu_seqlens(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def ragged_peers_of(device_type: str, attention_varlen: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """`attention_varlen`, which has flashtile's signature; where lengths are equal, flashtile's dense attention; and on
    a GPU PyTorch's own."""
    peers = [Peer(OURS, ragged(attention_varlen))]
    if len(set(case.lengths or ())) == 1:
        peers.append(Peer(DENSE, attention_dense))
    if device_type == "cuda" and (theirs := torch_varlen()):
        peers.append(Peer(TORCH_VARLEN, theirs))
    return peers


def ragged(attention_varlen: Callable[..., Any]) -> Attention:
    """A function of its signature, called as a case asks for it."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        return attention_varlen(q, k, v, **arguments(case, q.device))

    return ours


def attention_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """flashtile's dense attention on the same memory, seen as (B, S, H, D)."""
    from flashtile import attention

    q, k, v = (t.view(case.batch, -1, *t.shape[1:]) for t in (q, k, v))
    return attention(q, k, v, causal=case.causal, **options.arguments(case, q.device)).flatten(0, 1)


def torch_varlen() -> Attention | None:
    """PyTorch's own attention of ragged batches; None where this PyTorch is too old to have one."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters  # they changed from version to version

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        if refused := options.words(case, served=["window"] if "window_size" in known else []):
            raise NotImplementedError(f"varlen_attn is not asked for {refused} here")
        offsets, longest = _offsets_and_longest(case, q.device)
        asked: dict[str, Any] = {"is_causal": case.causal}
        if "window_size" in known:
            left, right = case.window or (None, None)
            right = 0 if case.causal else right
            asked = {"window_size": tuple(-1 if side is None else side for side in (left, right))}
        if "enable_gqa" in known:
            asked["enable_gqa"] = case.heads_q != case.heads_k
        out: Any = varlen_attn(q, k, v, offsets, offsets, longest, longest, **asked)  # alone, as no more is asked for
        return out

    return attention
