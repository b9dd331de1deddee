"""Rungs 8 and 9: flashtile's own kernels, for every GPU from Ampere on and for Hopper; instead of them, a CPU's.

All have FlashAttention-2's order of loops (rung 3), on a GPU with tensor cores.

- sm_80: copies to shared memory run ahead asynchronously (cp.async), and each warp keeps its rows' scores, O, m and l
  in registers (Dao 2023, arXiv:2307.08691).
- sm_90a: a warpgroup of its own issues copies by the tensor memory accelerator (TMA) into a ring of buffers, the others
  multiply with warpgroup instructions that read shared memory themselves, and the softmax of one tile runs beside the
  products of the next (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608).

docs/development.md says where each part stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re

import torch
from torch import Tensor

import flashtile
from flashtile._capability import limited
from flashtile.bench.cases import Case
from flashtile.reference._tiles import key_rows_swept, out_bytes, query_bytes


@dataclasses.dataclass(frozen=True)
class Kernels:
    """flashtile.attention with one family of kernels: `architecture` is "cpu", "sm80" or "sm90".

    >>> import torch
    >>> from flashtile.reference.flashtile_rungs import Kernels
    >>> q = torch.randn(1, 100, 2, 64)
    >>> Kernels("cpu").attention(q, q, q, causal=True).shape
    torch.Size([1, 100, 2, 64])
    >>> Kernels("sm90").available(torch.device("cpu"))
    'needs an NVIDIA GPU'
    """

    architecture: str

    @property
    def capability(self) -> int:
        return 0 if self.architecture == "cpu" else int(self.architecture.removeprefix("sm"))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        """Arguments and result as :func:`flashtile.attention`; differentiable, by the device's usual backward."""
        if reason := self.available(q.device):
            raise NotImplementedError(f"{self.architecture}: {reason}")
        with self._kernels(q.device):
            return flashtile.attention(q, k, v, causal=causal, scale=scale)

    # There are three of them, and a call must not wait for this.
    @functools.cache  # noqa: B019
    def available(self, device: torch.device) -> str | None:
        """Why this rung does not run on `device`, or None where it does."""
        if self.architecture == "cpu":
            return None if device.type == "cpu" else "is for CPUs"
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        if not any(name.startswith(self.architecture) for name in flashtile.info()["forward_kernels"]):
            return f"this build of flashtile holds no {self.architecture} kernels"
        major, minor = torch.cuda.get_device_capability(device)
        found = 10 * major + minor
        if found < self.capability or (self.architecture == "sm90" and found != self.capability):
            expected = "9.0" if self.architecture == "sm90" else "8.0 or newer"
            return f"needs compute capability {expected}, and this GPU has {major}.{minor}"
        return None

    def _kernels(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Limits the process to this family where `device` would get another; each time, its plans are made anew."""
        if device.type == "cuda" and torch.cuda.get_device_capability(device) != divmod(self.capability, 10):
            return limited(self.capability)
        return contextlib.nullcontext()

    def bytes_moved(self, case: Case) -> int:
        """As rung 3's, for the tile that flashtile chooses, every query head reading its own K and V."""
        device = "cpu" if self.architecture == "cpu" else "cuda"
        q, k, v = (
            torch.empty(case.batch, seqlen, heads, head_dim, dtype=case.torch_dtype, device=device)
            for seqlen, heads, head_dim in (
                (case.seqlen_q, case.heads_q, case.head_dim),
                (case.seqlen_k, case.heads_k, case.head_dim),
                (case.seqlen_k, case.heads_k, case.head_dim_v),
            )
        )
        with self._kernels(q.device):
            plan = flashtile.explain(q, k, v, causal=case.causal)
        ((block_m, block_n), *_) = re.findall(r"tile +(\d+) rows × (\d+) keys", plan)
        row_bytes = case.batch * case.heads_q * (case.head_dim + case.head_dim_v) * case.torch_dtype.itemsize
        return query_bytes(case) + key_rows_swept(case, int(block_m), int(block_n)) * row_bytes + out_bytes(case)
