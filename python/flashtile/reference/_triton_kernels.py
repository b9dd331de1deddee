"""Rung 7's kernels. A program's tile has BLOCK_M rows of Q and BLOCK_N of K and V; D is the head dimension.

q, out and their gradients are (B, S_q, H_q, D), k, v and theirs (B, S_k, H_k, D), contiguous; lse and delta are
float32, (B, H_q, S_q). Scores are in the log2 domain, as exp2 is what the hardware has; so is lse here. A row that sees
nothing has lse 0, and its weights are 0 because all its scores are −inf.
"""

import math
import subprocess

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from flashtile.reference.triton_flash2 import forward_tile

LOG2_E = math.log2(math.e)
# One kernel for all lengths, not one more for those that 16 divides: addresses are multiples of D anyway.
SIZES = ("seqlen_q", "seqlen_k", "heads_q", "heads_k")
LOWEST = tl.constexpr(-3.0e38)  # a row's maximum before it has seen anything: finite, so differences are never NaN


@triton.jit
def _rows(base, first, length, step, BLOCK: tl.constexpr, D: tl.constexpr):
    """Addresses of BLOCK rows from `first` on, `step` elements apart, and which of them are before `length`."""
    rows = first + tl.arange(0, BLOCK)
    inside = rows < length
    return base + rows.to(tl.int64)[:, None] * step + tl.arange(0, D)[None, :], inside[:, None]


@triton.jit
def _scores(q, k, first_row, first_column, seqlen_q, seqlen_k, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """q kᵀ of a tile, (rows of q, rows of k); −inf where a row does not see a column, or there is none."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        rows = first_row + tl.arange(0, q.shape[0])
        columns = first_column + tl.arange(0, k.shape[0])
        seen = (columns < seqlen_k)[None, :] & (rows < seqlen_q)[:, None]
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None] + (seqlen_k - seqlen_q))
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _sweep(
    q, k_base, v_base, o, top, total, begin, end, first_row, seqlen_q, seqlen_k, k_step, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rung 3's inner loop over the columns [begin, end)."""
    for first in range(begin, end, BLOCK_N):
        k_at, inside = _rows(k_base, first, seqlen_k, k_step, BLOCK_N, D)
        k = tl.load(k_at, mask=inside, other=0.0)
        s = _scores(q, k, first_row, first, seqlen_q, seqlen_k, CAUSAL, MASKED) * scale_log2
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        correction = tl.exp2(top - new_top)
        total = total * correction + tl.sum(p, 1)
        v_at, inside = _rows(v_base, first, seqlen_k, k_step, BLOCK_N, D)
        v = tl.load(v_at, mask=inside, other=0.0)
        o = tl.dot(p.to(v.dtype), v, o * correction[:, None], input_precision="ieee")
        top = new_top
    return o, top, total


@triton.jit(do_not_specialize=SIZES)
def _forward(
    q, k, v, out, lse, scale_log2, seqlen_q, seqlen_k, heads_q, heads_k,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    head = (tl.program_id(0) // num_tiles).to(tl.int64)  # of the whole batch
    # The last rows of a causal mask see the most: they begin first.
    first_row = (num_tiles - 1 - tl.program_id(0) % num_tiles) * BLOCK_M
    b, h = head // heads_q, head % heads_q
    q_step, k_step = heads_q * D, heads_k * D
    kv_offset = b * seqlen_k * k_step + h // (heads_q // heads_k) * D
    q_offset = b * seqlen_q * q_step + h * D

    q_at, inside = _rows(q + q_offset, first_row, seqlen_q, q_step, BLOCK_M, D)
    q_tile = tl.load(q_at, mask=inside, other=0.0)
    o = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # Columns in front of `whole` are seen by all rows, in whole tiles: no mask. From `end` on nobody sees any.
    end, whole = seqlen_k, seqlen_k
    if CAUSAL:
        diagonal = first_row + seqlen_k - seqlen_q  # of the first row
        end = tl.minimum(seqlen_k, tl.maximum(0, diagonal + BLOCK_M))
        whole = tl.minimum(seqlen_k, tl.maximum(0, diagonal + 1))
    whole = whole // BLOCK_N * BLOCK_N
    o, top, total = _sweep(q_tile, k + kv_offset, v + kv_offset, o, top, total, 0, whole, first_row, seqlen_q, seqlen_k,
                           k_step, scale_log2, D, BLOCK_N, CAUSAL, False)  # fmt: skip
    o, top, total = _sweep(q_tile, k + kv_offset, v + kv_offset, o, top, total, whole, end, first_row, seqlen_q,
                           seqlen_k, k_step, scale_log2, D, BLOCK_N, CAUSAL, True)  # fmt: skip

    blind = total == 0
    o = o / tl.where(blind, 1.0, total)[:, None]
    out_at, inside = _rows(out + q_offset, first_row, seqlen_q, q_step, BLOCK_M, D)
    tl.store(out_at, o.to(out.dtype.element_ty), mask=inside)
    rows = first_row + tl.arange(0, BLOCK_M)
    lse_tile = tl.where(blind, 0.0, top + tl.log2(tl.where(blind, 1.0, total)))
    tl.store(lse + head * seqlen_q + rows, lse_tile, mask=rows < seqlen_q)


@triton.jit(do_not_specialize=SIZES)
def _backward_keys(
    q, k, v, dout, lse, delta, dk, dv, scale, scale_log2, seqlen_q, seqlen_k, heads_q, heads_k,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of columns of a KV head: the rows of all its query heads pass by."""
    num_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    first_column = tl.program_id(0) % num_tiles * BLOCK_N
    b, g = head // heads_k, head % heads_k
    group = heads_q // heads_k
    q_step, k_step = heads_q * D, heads_k * D
    kv_offset = b * seqlen_k * k_step + g * D

    k_at, inside_k = _rows(k + kv_offset, first_column, seqlen_k, k_step, BLOCK_N, D)
    v_at, inside_k = _rows(v + kv_offset, first_column, seqlen_k, k_step, BLOCK_N, D)
    k_tile = tl.load(k_at, mask=inside_k, other=0.0)
    v_tile = tl.load(v_at, mask=inside_k, other=0.0)
    dk_tile = tl.zeros([BLOCK_N, D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, D], tl.float32)
    begin = 0
    if CAUSAL:  # the first row that sees a column of this tile, down to a whole tile of rows
        begin = tl.maximum(0, first_column - (seqlen_k - seqlen_q)) // BLOCK_M * BLOCK_M
    for member in range(0, group):
        h = g * group + member
        q_offset = b * seqlen_q * q_step + h * D
        stats = (b * heads_q + h) * seqlen_q
        for first_row in range(begin, seqlen_q, BLOCK_M):
            q_at, inside = _rows(q + q_offset, first_row, seqlen_q, q_step, BLOCK_M, D)
            do_at, inside = _rows(dout + q_offset, first_row, seqlen_q, q_step, BLOCK_M, D)
            rows = first_row + tl.arange(0, BLOCK_M)
            q_tile = tl.load(q_at, mask=inside, other=0.0)
            do_tile = tl.load(do_at, mask=inside, other=0.0)
            lse_tile = tl.load(lse + stats + rows, mask=rows < seqlen_q, other=0.0)
            delta_tile = tl.load(delta + stats + rows, mask=rows < seqlen_q, other=0.0)
            s = _scores(q_tile, k_tile, first_row, first_column, seqlen_q, seqlen_k, CAUSAL, True) * scale_log2
            p = tl.exp2(s - lse_tile[:, None])
            dv_tile = tl.dot(tl.trans(p).to(do_tile.dtype), do_tile, dv_tile, input_precision="ieee")
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
            ds = p * (dp - delta_tile[:, None])
            dk_tile = tl.dot(tl.trans(ds).to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")
    dk_at, inside_k = _rows(dk + kv_offset, first_column, seqlen_k, k_step, BLOCK_N, D)
    dv_at, inside_k = _rows(dv + kv_offset, first_column, seqlen_k, k_step, BLOCK_N, D)
    tl.store(dk_at, (dk_tile * scale).to(dk.dtype.element_ty), mask=inside_k)
    tl.store(dv_at, dv_tile.to(dv.dtype.element_ty), mask=inside_k)


@triton.jit(do_not_specialize=SIZES)
def _backward_queries(
    q, k, v, dout, lse, delta, dq, scale, scale_log2, seqlen_q, seqlen_k, heads_q, heads_k,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of rows of a query head: the columns that they see pass by."""
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    first_row = tl.program_id(0) % num_tiles * BLOCK_M
    b, h = head // heads_q, head % heads_q
    q_step, k_step = heads_q * D, heads_k * D
    q_offset = b * seqlen_q * q_step + h * D
    kv_offset = b * seqlen_k * k_step + h // (heads_q // heads_k) * D

    q_at, inside = _rows(q + q_offset, first_row, seqlen_q, q_step, BLOCK_M, D)
    do_at, inside = _rows(dout + q_offset, first_row, seqlen_q, q_step, BLOCK_M, D)
    rows = first_row + tl.arange(0, BLOCK_M)
    q_tile = tl.load(q_at, mask=inside, other=0.0)
    do_tile = tl.load(do_at, mask=inside, other=0.0)
    lse_tile = tl.load(lse + head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
    delta_tile = tl.load(delta + head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
    dq_tile = tl.zeros([BLOCK_M, D], tl.float32)
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, tl.maximum(0, first_row + BLOCK_M + seqlen_k - seqlen_q))
    for first_column in range(0, end, BLOCK_N):
        k_at, inside_k = _rows(k + kv_offset, first_column, seqlen_k, k_step, BLOCK_N, D)
        v_at, inside_k = _rows(v + kv_offset, first_column, seqlen_k, k_step, BLOCK_N, D)
        k_tile = tl.load(k_at, mask=inside_k, other=0.0)
        v_tile = tl.load(v_at, mask=inside_k, other=0.0)
        s = _scores(q_tile, k_tile, first_row, first_column, seqlen_q, seqlen_k, CAUSAL, True) * scale_log2
        p = tl.exp2(s - lse_tile[:, None])
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - delta_tile[:, None])
        dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")
    dq_at, inside = _rows(dq + q_offset, first_row, seqlen_q, q_step, BLOCK_M, D)
    tl.store(dq_at, (dq_tile * scale).to(dq.dtype.element_ty), mask=inside)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out, of q's shape and dtype, and lse in the log2 domain, float32 (B, H_q, S_q)."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    block_m, block_n = forward_tile(q.shape[3], q.element_size())
    programs = triton.cdiv(q.shape[1], block_m) * q.shape[0] * q.shape[2]
    warps = 8 if block_m * q.shape[3] >= 128 * 128 else 4
    arguments = q, k, v, out, lse, scale * LOG2_E, *_sizes(q, k)
    _launch(_forward, programs, arguments, q, block_m, block_n, causal, warps)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    dout, q, k, v = (x.contiguous() for x in (dout, q, k, v))
    delta = (dout.float() * out.float()).sum(dim=-1).transpose(1, 2).contiguous()
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    block = 64 if q.shape[3] * q.element_size() <= 256 else 32 if q.shape[3] * q.element_size() <= 512 else 16
    common = q, k, v, dout, lse, delta
    rest = scale, scale * LOG2_E, *_sizes(q, k)
    keys = triton.cdiv(k.shape[1], block) * k.shape[0] * k.shape[2]
    queries = triton.cdiv(q.shape[1], block) * q.shape[0] * q.shape[2]
    _launch(_backward_keys, keys, (*common, dk, dv, *rest), q, block, block, causal, 4)
    _launch(_backward_queries, queries, (*common, dq, *rest), q, block, block, causal, 4)
    return dq, dk, dv


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    return q.shape[1], k.shape[1], q.shape[2], k.shape[2]


def _launch(kernel, programs: int, arguments: tuple, q: Tensor, block_m: int, block_n: int, causal: bool, warps: int):
    if programs == 0:
        return
    constants = {"D": q.shape[3], "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": causal}
    try:
        with torch.cuda.device(q.device if q.is_cuda else -1):
            kernel[(programs,)](*arguments, **constants, num_warps=warps, num_stages=2)
    except (TritonError, subprocess.CalledProcessError) as error:  # too large a tile, or no working compiler
        raise NotImplementedError(f"triton_flash2: D = {q.shape[3]} in {q.dtype}: {error}") from error
