"""Rung 10: attention of e4m3 numbers, half the bytes of 16 bits and twice as many products in a second.

Inputs are rounded beforehand, with a descale for each block of 128 rows of a head, q and k after the same random
rotation (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608, section 3.3). On Hopper the kernel is rung 9's with two
warps that transpose V in shared memory, as matmuls of 8 bits want it. A CPU computes the same slowly: in float32, of
numbers times descales, with weights that are rounded likewise. On other GPUs flashtile multiplies numbers with their
descales and attends in 16 bits: that would be rung 8's time, and more, under this one's name, so it does not run there.

docs/fp8.md says what is rounded, and where.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile._core import WIDEST
from flashtile.bench.cases import Case
from flashtile.bench.fp8 import E4M3, descales_of, in_blocks
from flashtile.fp8 import Quantized
from flashtile.reference._tiles import STATE_BYTES, key_rows_of_tiles, out_bytes

KERNELS = "sm90_e4m3"
HEAD_DIM_MULTIPLE = 16
DESCALED_ROWS = 64  # for as many the kernel reads a descale


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Arguments and result as :func:`flashtile.reference.standard.attention`; forward only. It rounds, then attends:
    `rounded` and `of_numbers` are the two by themselves.

    float16 or bfloat16, on a CPU also float32; D and D_v are multiples of 16 up to 256.

    Raises:
        NotImplementedError: other dtypes or head dimensions, or :func:`available` has a reason.

    >>> import torch
    >>> from flashtile.reference import fp8, standard
    >>> q, k, v = torch.randn(3, 1, 300, 2, 64)
    >>> error = fp8.attention(q, k, v) - standard.attention(q, k, v)
    >>> bool(error.norm() < 0.1 * standard.attention(q, k, v).norm())
    True
    """
    return of_numbers(rounded(q, k, v), causal=causal, scale=scale, out_dtype=q.dtype)


def rounded(q: Tensor, k: Tensor, v: Tensor) -> Quantized:
    """What :func:`attention` attends to. The ladder does not time it: who writes keys and values rounds them once."""
    if reason := unserved(q.device, q.dtype, q.shape[3], v.shape[3]):
        raise NotImplementedError(f"fp8: {reason}")
    return in_blocks(q, k, v)


def of_numbers(x: Quantized, *, causal: bool = False, scale: float | None = None, out_dtype: torch.dtype) -> Tensor:
    """Attention of numbers that are there: what the ladder times."""
    descales: dict[str, Any] = descales_of(x)
    out: Tensor = flashtile.attention(x.q, x.k, x.v, causal=causal, scale=scale, out_dtype=out_dtype, **descales)
    return out


def bytes_moved(case: Case) -> int:
    """As rung 9's for the tile that flashtile chooses on Hopper: a byte for each number of Q, K and V, with a descale
    for each 64 rows, and the result in the dtype of the call. A CPU is charged the same."""
    block_m, block_n = _tile(case)
    swept = key_rows_of_tiles(case, block_m, block_n)
    numbers = case.seqlen_q * case.head_dim + sum(swept) * (case.head_dim + case.head_dim_v)
    descales = _descales(case.seqlen_q) + 2 * sum(map(_descales, swept))
    return case.batch * case.heads_q * (numbers * E4M3.itemsize + descales * STATE_BYTES) + out_bytes(case)


def unserved(device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> str | None:
    """Why this rung does not attend to such inputs on `device`, or None where it does."""
    if reason := available(device):
        return reason
    dtypes = (torch.float16, torch.bfloat16, *([torch.float32] if device.type == "cpu" else []))
    if dtype not in dtypes:
        return f"q has dtype {dtype} on {device.type}, expected one of {', '.join(map(str, dtypes))}"
    if head_dim % HEAD_DIM_MULTIPLE or head_dim_v % HEAD_DIM_MULTIPLE or max(head_dim, head_dim_v) > WIDEST:
        expected = f"multiples of {HEAD_DIM_MULTIPLE} up to {WIDEST}"
        return f"has D = {head_dim} and D_v = {head_dim_v}, expected {expected}"
    return None


@functools.cache  # asking what a build holds takes longer than a small attention
def available(device: torch.device) -> str | None:
    """Why this rung does not run on `device`, or None where it does."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return "needs an NVIDIA GPU or a CPU"
    if not any(name.startswith(KERNELS) for name in flashtile.info()["forward_kernels"]):
        return f"this build of flashtile holds no {KERNELS} kernels"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"needs compute capability 9.0, and this GPU has {major}.{minor}: flashtile attends in 16 bits there"
    return None


def _tile(case: Case) -> tuple[int, int]:
    """Rows of Q and rows of K in a tile of Hopper's kernel for it, wherever this runs."""
    q, k, v = (
        torch.empty(case.batch, seqlen, heads, head_dim, dtype=E4M3, device="meta")
        for seqlen, heads, head_dim in (
            (case.seqlen_q, case.heads_q, case.head_dim),
            (case.seqlen_k, case.heads_k, case.head_dim),
            (case.seqlen_k, case.heads_k, case.head_dim_v),
        )
    )
    plan = flashtile.explain(q, k, v, causal=case.causal, device="H100")
    ((block_m, block_n), *_) = re.findall(r"tile +(\d+) rows × (\d+) keys", plan)
    return int(block_m), int(block_n)


def _descales(rows: int) -> int:
    return math.ceil(rows / DESCALED_ROWS)
