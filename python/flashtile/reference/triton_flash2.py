"""Rung 7: FlashAttention-2 in Triton, forward and backward.

The forward is rung 3's (Dao 2023, arXiv:2307.08691, Algorithm 1) with a program for each tile of Q, and keeps lse for
the backward. That is the paper's Algorithm 2 in two kernels, neither of which needs atomics: with P = exp(S − lse)
computed again and Δ = Σ dO ⊙ O of each row

    dV = Pᵀ dO       dS = P ⊙ (dO Vᵀ − Δ)       dK = scale · dSᵀ Q       dQ = scale · dS K

one has a program for each tile of K and V and sums dK and dV over all rows, and over the query heads that share them;
the other has a program for each tile of Q and sums dQ. The kernels are in `_triton_kernels.py`, which imports triton;
this module does not, until it is called.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from flashtile.bench.cases import Case
from flashtile.reference._tiles import STATE_BYTES, key_rows_swept, out_bytes, query_bytes, score_scale

HEAD_DIMS = (16, 32, 64, 128, 256)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        from flashtile.reference import _triton_kernels

        out, lse = _triton_kernels.forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = causal, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        from flashtile.reference import _triton_kernels

        return *_triton_kernels.backward(dout, *ctx.saved_tensors, *ctx.options), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Arguments and result as :func:`flashtile.reference.standard.attention`; differentiable once.

    float16, bfloat16 or float32; D = D_v, one of 16, 32, 64, 128 and 256.

    Raises:
        NotImplementedError: other dtypes or head dimensions, a kernel that Triton fails to compile or that is too large
            for the GPU, or :func:`available` has a reason.

    >>> import torch
    >>> from flashtile.reference import triton_flash2
    >>> q = torch.randn(1, 100, 2, 64, device="cuda", requires_grad=True)  # doctest: +SKIP
    >>> triton_flash2.attention(q, q, q, causal=True).sum().backward()  # doctest: +SKIP
    """
    if reason := available(q.device):
        raise NotImplementedError(f"triton_flash2: {reason}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise NotImplementedError(f"triton_flash2: q has dtype {q.dtype}, expected float16, bfloat16 or float32")
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        raise NotImplementedError("triton_flash2: Triton's interpreter multiplies no bfloat16, expected another dtype")
    if q.shape[3] not in HEAD_DIMS or v.shape[3] != q.shape[3]:
        found = f"D = {q.shape[3]} and D_v = {v.shape[3]}"
        raise NotImplementedError(f"triton_flash2: has {found}, expected D = D_v among {HEAD_DIMS}")
    return _Attention.apply(q, k, v, causal, score_scale(q, scale))


def forward_tile(head_dim: int, itemsize: int) -> tuple[int, int]:
    """Rows of Q and rows of K in the forward's tile: the wider a row, the fewer, as shared memory holds them."""
    row_bytes = head_dim * itemsize
    if row_bytes <= 256:
        return 128, 64
    return (64, 32) if row_bytes <= 512 else (32, 16)


def bytes_moved(case: Case) -> int:
    """As rung 3's for the forward's tile, every query head reading its own K and V; and lse, written."""
    itemsize = case.torch_dtype.itemsize
    lse = case.batch * case.heads_q * case.seqlen_q * STATE_BYTES
    row_bytes = case.batch * case.heads_q * (case.head_dim + case.head_dim_v) * itemsize
    swept = key_rows_swept(case, *forward_tile(case.head_dim, itemsize))
    return query_bytes(case) + swept * row_bytes + out_bytes(case) + lse


def available(device: torch.device) -> str | None:
    """Why this rung does not run on `device`, or None where it does."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton: pip install 'flashtile[triton]'"
    if device.type == "cuda":
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "needs a GPU, or Triton's slow interpreter: TRITON_INTERPRET=1"
