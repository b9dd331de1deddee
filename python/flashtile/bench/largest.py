"""Suite max-logits: what the largest score of each head costs beside the results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from flashtile.bench.cases import Case
from flashtile.bench.peers import Peer
from flashtile.bench.rivals import rivals_of

SUITE = "max-logits"
PAGE_SIZE = 16
WITHOUT = "without"  # flashtile's own calls, without return_max_logits
TOKENS = 16384
SEQLENS = (512, 4096, 16384)
MASKED = 4096
HEADS = ((32, 32, 64), (16, 16, 96), (16, 16, 128), (32, 8, 128), (8, 8, 192), (8, 8, 256))  # H_q, H_k, D
LENGTHS = (8192, *(256,) * 24, 2048)  # of a ragged batch


def cases_of(dtype: str, part: int = 1) -> list[Case]:
    """Dense, ragged and masked forwards, two prefills, one of few tiles, and a decode. Where lengths are a `part` of a
    GPU's, heads are few."""
    found = []
    for heads_q, heads_k, head_dim in HEADS:
        heads = (heads_q, heads_k, head_dim) if part == 1 else (4, 2, head_dim)
        for seqlen, causal in itertools.product(SEQLENS, (True, False)):
            rows = seqlen // part
            found.append(Case(TOKENS // seqlen, rows, rows, *heads, head_dim, dtype=dtype, causal=causal))
        found.append(Case.ragged([length // part for length in LENGTHS], *heads, dtype=dtype, causal=True))
        sizes = TOKENS // MASKED, MASKED // part, MASKED // part, *heads, head_dim
        found.append(Case(*sizes, dtype=dtype, columns="causal_document"))
        pages: dict[str, Any] = {"dtype": dtype, "page_size": PAGE_SIZE}
        for batch, chunk in ((4, 512), (1, 64)):
            found.append(Case.prefill(batch, chunk // part, 8192 // part, *heads, **pages))
        found.append(Case.decode(16, 8192 // part, *heads, **pages))
    return list(dict.fromkeys(found))


def peers_of(device_type: str, attention: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """`attention`, which has the signature of `attention_of_any`, with return_max_logits and without."""

    def asked(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return attention(*tensors, **arguments, return_max_logits=True)[0]

    with_largest, without = (rivals_of(device_type, function, case)[0] for function in (asked, attention))
    return [with_largest, dataclasses.replace(without, name=WITHOUT)]
