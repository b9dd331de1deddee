"""Suite invariant: what one set of bits from training to decoding costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from flashtile.bench.cases import TRAINING, Case
from flashtile.bench.peers import Peer
from flashtile.bench.rivals import rivals_of

SUITE = "invariant"
FREE = "free"  # flashtile's own calls, without batch_invariant
PAGE_SIZE = 16
HEADS = ((16, 16, 64), (32, 8, 128))  # H_q, H_k, D


def cases_of(dtype: str, part: int = 1) -> list[Case]:
    """The stages of a sequence's life: training, dense and ragged, prefill, whole and in a chunk, and decoding. Where
    lengths are a `part` of a GPU's, heads are few."""
    long, short, chunk = 8192 // part, 1024 // part, 512 // part
    batches = (1, 16, 128) if part == 1 else (1, 3)
    found = []
    for heads_q, heads_k, head_dim in HEADS:
        heads = (heads_q, heads_k, head_dim) if part == 1 else (4, 2, head_dim)
        for work in TRAINING:
            options: dict[str, Any] = {"dtype": dtype, "causal": True, "work": work}
            found += [Case(batch, rows, rows, *heads, head_dim, **options) for batch, rows in ((2, long), (16, short))]
            found.append(Case.ragged((long, *(short // 4,) * 32, short), *heads, **options))
        pages: dict[str, Any] = {"dtype": dtype, "page_size": PAGE_SIZE}
        found += [Case.prefill(*sizes, *heads, **pages) for sizes in ((2, long, long), (4, chunk, long))]
        found += [Case.decode(batch, long, *heads, **pages) for batch in batches]
    return found


def peers_of(device_type: str, attention: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """`attention`, which has the signature of `attention_of_any`, with batch_invariant and without; FA2 of PyTorch, on
    a CPU its own choice."""
    ours, *others = rivals_of(device_type, functools.partial(attention, batch_invariant=True), case)
    free = rivals_of(device_type, functools.partial(attention, batch_invariant=False), case)[0]
    theirs = [peer for peer in others if peer.name in ("SDPA FA2", "SDPA", "torch varlen")]
    return [ours, dataclasses.replace(free, name=FREE), *theirs]
