"""What attention is asked for beside its mask's causal: a case's options by the names that flashtile has for them, and
the tensors among them, which follow from the case."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from flashtile.bench.cases import Case
from flashtile.bench.columns import mask_of

WORDS = {
    "window": "windows",
    "mask": "column masks",
    "softcap": "softcap",
    "alibi_slopes": "ALiBi",
    "sinks": "sinks",
    "dropout_p": "dropout",
}


def names(case: Case) -> list[str]:
    """The options that this case has."""
    given = (case.window is not None, case.columns, case.softcap, case.alibi, case.sinks, case.dropout_p)
    return [name for name, has in zip(WORDS, given, strict=True) if has]


def words(case: Case, served: Sequence[str] = ()) -> str:
    """The same for people, but for those that are served: what a refusal names."""
    return " and ".join(WORDS[name] for name in names(case) if name not in served)


def arguments(case: Case, device: torch.device) -> dict[str, Any]:
    """What flashtile, and every --peer, is given by keyword: nothing that the case does not have."""
    given: dict[str, Any] = {}
    if case.window is not None:
        given["window"] = case.window
    if case.columns:
        given["mask"] = mask_of(case, device)
    if case.softcap:
        given["softcap"] = case.softcap
    if case.alibi:
        given["alibi_slopes"] = alibi_slopes(case.heads_q, device)
    if case.sinks:
        given["sinks"] = sinks(case.heads_q, device)
    if case.dropout_p:
        given["dropout_p"] = case.dropout_p
    return given


# Both are made by a case's check, so that the timed calls launch nothing for them.
@functools.lru_cache(maxsize=8)
def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Those of Press et al. 2021, a geometric sequence from 2^(-8 / heads) to 2^-8; float32."""
    return torch.exp2(torch.arange(1, heads + 1, device=device, dtype=torch.float32) * (-8 / heads))


@functools.lru_cache(maxsize=8)
def sinks(heads: int, device: torch.device) -> torch.Tensor:
    """Logits up to 4, the largest for the last head, which is among those that are judged; float32."""
    return torch.arange(1, heads + 1, device=device, dtype=torch.float32) * (4 / heads)
