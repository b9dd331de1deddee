"""Who is timed on column masks: flashtile, and where another of its functions has a name for the mask, that one too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from flashtile.bench.cases import Case
from flashtile.bench.columns import documents_of, window_of
from flashtile.bench.oracle import Attention
from flashtile.bench.peers import OURS, Peer, dense
from flashtile.bench.ragged import ragged

BAND, VARLEN = "band", "varlen"  # flashtile's own columns
BANDS = ("full", "causal", "sliding_window")
OF_DOCUMENTS = {"document": False, "causal_document": True}  # whether they are causal


def masked_peers_of(attention: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """`attention`, which has flashtile's signature, on the mask, and on the band that it is; or flashtile's ragged
    attention of its documents."""
    peers = [Peer(OURS, dense(attention))]
    if case.columns in BANDS:
        peers.append(Peer(BAND, Renamed(dense(attention), as_band)))
    if case.columns in OF_DOCUMENTS:
        from flashtile import attention_varlen

        peers.append(Peer(VARLEN, Renamed(ragged(attention_varlen), as_documents)))
    return peers


def as_band(case: Case) -> Case:
    window = (window_of(case.seqlen_q) - 1, 0) if case.columns == "sliding_window" else None
    return dataclasses.replace(case, columns="", causal=case.columns != "full", window=window)


def as_documents(case: Case) -> Case:
    """The documents of all entries of the batch, one behind the other, as a ragged batch."""
    if case.columns not in OF_DOCUMENTS:
        raise NotImplementedError(f"it is asked for {' and '.join(OF_DOCUMENTS)} alone here")
    lengths, causal = documents_of(case), OF_DOCUMENTS[case.columns]
    sizes = case.heads_q, case.heads_k, case.head_dim
    return Case.ragged(lengths, *sizes, dtype=case.dtype, causal=causal, work=case.work)


class Renamed:
    """An attention that is asked for the same by another name: for the case that `rename` makes of the one at hand."""

    def __init__(self, attention: Attention, rename: Callable[[Case], Case]) -> None:
        self._attention = attention
        self._rename = rename
        self._case: Case | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        if case is not self._case:  # to compare their values would take a microsecond of each timed call
            self._renamed, self._case = self._rename(case), case
        if self._renamed.lengths is None:
            return self._attention(q, k, v, self._renamed)
        out = self._attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), self._renamed)
        return out.unflatten(0, q.shape[:2])
