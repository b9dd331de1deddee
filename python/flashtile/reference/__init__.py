"""The ladder: attention from the textbook to Hopper, rung by rung, each one short and all with one signature.

    attention(q, k, v, *, causal=False, scale=None) -> out

in flashtile's layout, (B, S, H, D), with query heads that share KV heads by index, masks aligned at the bottom right,
and 0 where a row sees nothing (docs/contract.md). docs/ladder.md goes up the ladder, `flashtile ladder` times it.

>>> import torch
>>> from flashtile.reference import RUNGS, rung
>>> q, k, v = torch.randn(3, 1, 100, 2, 16)
>>> torch.allclose(rung("flash2").attention(q, k, v), rung("standard").attention(q, k, v), atol=1e-5)
True
>>> rung("sm90").available(torch.device("cpu"))
'needs an NVIDIA GPU'

Importing this compiles nothing and does not import triton.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from flashtile._refusal import Refusal
from flashtile.bench.cases import Case
from flashtile.bench.peers import Rounding
from flashtile.reference import (
    cuda_minimal,
    flash1,
    flash2,
    flash_decoding,
    flash_decoding_pp,
    fp8,
    standard,
    triton_flash2,
)
from flashtile.reference.flashtile_rungs import Kernels

__all__ = ["RUNGS", "RoundedRung", "Rung", "rung"]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One attention of the ladder, how many bytes it moves between HBM and the multiprocessors, and where it runs."""

    number: int
    key: str
    title: str
    attention: Callable[..., torch.Tensor]
    bytes_moved: Callable[[Case], int]
    available: Callable[[torch.device], str | None] = lambda device: None  # the reason why not, or None

    def refusal(self, case: Case, device: torch.device) -> str | None:
        """Why it is not called with this case, or None where it is, and may still refuse."""
        return self.available(device)

    def bound(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[..., torch.Tensor]:
        """What is timed: `attention` of these inputs, called with its options."""
        return functools.partial(self.attention, q, k, v)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundedRung(Rung):
    """One whose attention is `of_numbers`, to which `rounding` rounds the inputs beforehand."""

    rounding: Rounding
    of_numbers: Callable[..., torch.Tensor]
    unserved: Callable[[torch.device, torch.dtype, int, int], str | None]

    def refusal(self, case: Case, device: torch.device) -> str | None:
        return self.unserved(device, case.torch_dtype, case.head_dim, case.head_dim_v)

    def bound(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[..., torch.Tensor]:
        return functools.partial(self.of_numbers, self.rounding(q, k, v), out_dtype=q.dtype)


def _flashtile_rung(number: int, architecture: str, title: str) -> Rung:
    kernels = Kernels(architecture)
    return Rung(number, architecture, title, kernels.attention, kernels.bytes_moved, kernels.available)


RUNGS = (
    Rung(1, "standard", "standard attention", standard.attention, standard.bytes_moved),
    Rung(2, "flash1", "FlashAttention-1, PyTorch", flash1.attention, flash1.bytes_moved),
    Rung(3, "flash2", "FlashAttention-2, PyTorch", flash2.attention, flash2.bytes_moved),
    Rung(4, "flash-decoding", "Flash-Decoding, PyTorch", flash_decoding.attention, flash_decoding.bytes_moved),
    Rung(5, "flash-decoding++", "FlashDecoding++, PyTorch", flash_decoding_pp.attention, flash_decoding_pp.bytes_moved),
    Rung(
        6,
        "cuda-minimal",
        "FlashAttention-1, minimal CUDA",
        cuda_minimal.attention,
        cuda_minimal.bytes_moved,
        cuda_minimal.available,
    ),
    Rung(
        7,
        "triton",
        "FlashAttention-2, Triton",
        triton_flash2.attention,
        triton_flash2.bytes_moved,
        triton_flash2.available,
    ),
    _flashtile_rung(8, "sm80", "flashtile sm_80"),
    _flashtile_rung(9, "sm90", "flashtile sm_90a"),
    RoundedRung(
        10,
        "fp8",
        "flashtile, fp8",
        fp8.attention,
        fp8.bytes_moved,
        fp8.available,
        rounding=fp8.rounded,
        of_numbers=fp8.of_numbers,
        unserved=fp8.unserved,
    ),
    _flashtile_rung(11, "cpu", "flashtile, CPU"),  # instead of 8 and 9, where there is no GPU
)


def rung(key: str) -> Rung:
    """The rung of this name; a ValueError says which there are."""
    for found in RUNGS:
        if found.key == key:
            return found
    raise Refusal(f"ladder: rung is {key!r}, expected one of {', '.join(found.key for found in RUNGS)}")
