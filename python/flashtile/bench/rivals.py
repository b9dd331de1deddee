"""Who is timed on the cases of suite random, which are of every kind: flashtile's functions as one, without a case's
options too, and PyTorch's attention on memory of either layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashtile.bench.cases import Case
from flashtile.bench.decode import Paged, attention_lower_right, sdpa_over_a_cache
from flashtile.bench.oracle import Attention, sdpa, sdpa_mask
from flashtile.bench.peers import OURS, PLAIN, Peer, cuda_settings, dense
from flashtile.bench.ragged import ragged, ragged_peers_of

CUDNN_HEADS_FIRST = "SDPA cuDNN BHSD"


def attention_of_any(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """flashtile's function of dense tensors, of ragged batches or of caches, by the arguments, as `explain` tells."""
    import flashtile

    if "cache_seqlens" in arguments:
        return flashtile.attention_kvcache(*tensors, **arguments)
    if "cu_seqlens_q" in arguments:
        return flashtile.attention_varlen(*tensors, **arguments)
    return flashtile.attention(*tensors, **arguments)


def rivals_of(device_type: str, attention: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """`attention`, which has the signature of `attention_of_any`, on the case and, where it has options, on its plain
    form; PyTorch's own."""
    ours = _ours(attention, case)
    forms = [Peer(OURS, ours), *([Peer(PLAIN, ours, asked=Case.plain)] if case != case.plain() else [])]
    if case.over_a_cache:
        return [*forms, *sdpa_over_a_cache(device_type, case)]
    if case.lengths is not None:
        return [*forms, *ragged_peers_of(device_type, attention, case)[1:]]
    masked = Masked()
    if device_type != "cuda":
        return [*forms, Peer("SDPA", masked)]
    settings = cuda_settings()
    theirs = [Peer(name, masked, setting) for name, setting in settings.items()]
    theirs.append(Peer(CUDNN_HEADS_FIRST, masked, settings["SDPA cuDNN"], heads_first=True))
    if not case.is_square_band and case.window is None and case == case.plain():
        # FA2 takes no mask, and has a name for the one of a chunk.
        theirs[0] = Peer("SDPA FA2", attention_lower_right, settings["SDPA FA2"])
    return [*forms, *theirs]


def explained(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """What `flashtile.explain` says of flashtile's call in this case, or its refusal."""
    import flashtile

    explain: Callable[..., Any] = flashtile.explain
    try:
        return str(_ours(explain, case)(q, k, v, case))
    except NotImplementedError as refusal:
        return str(refusal)


def _ours(attention: Callable[..., Any], case: Case) -> Attention:
    if case.over_a_cache:
        return Paged(attention, case.page_size)
    return dense(attention) if case.lengths is None else ragged(attention)


class Masked:
    """PyTorch's scaled_dot_product_attention. A case's first call, its check, makes the mask; the timed calls find
    that."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._mask: torch.Tensor | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        if case is not self._case:  # to compare their values would take a microsecond of each timed call
            self._mask = sdpa_mask(case, q)
            self._case = case
        return sdpa(q, k, v, case, self._mask)
