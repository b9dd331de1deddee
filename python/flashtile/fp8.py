"""Queries, keys and values as fp8 numbers (e4m3), each block of rows with a scale of its own.

FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.3) rounds them so: e4m3 has three bits of mantissa, and
few large elements would leave the others of a tensor next to none. A scale for each block confines them to it, and a
random rotation of queries and keys, which leaves their products as they are, spreads them over the row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import _C
from ._core import DTYPES, WIDEST, is_compiling, readable, require_tensors
from ._fp8 import BLOCKS, E4M3, dequantized
from ._ops import define

__all__ = ["BLOCKS", "Quantized", "dequantize", "quantize"]

_FUNCTION = "quantize"
_LARGEST = torch.finfo(E4M3).max
_LEAST = 2.0**-126  # descale, so that its inverse is finite
_WORD = 64  # bits


class Quantized(NamedTuple):
    """What :func:`quantize` returns: numbers of dtype float8_e4m3fn, and the float32 scales of their blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor


def quantize(q: Tensor, k: Tensor, v: Tensor, *, block: int = 128, rotate: bool = True, seed: int = 0) -> Quantized:
    """Rounds queries, keys and values to fp8.

    Each block of ``block`` neighbouring rows of a head is divided by its descale, its largest magnitude over 448, the
    largest number of e4m3, and rounded to nearest, ties to even. With ``rotate``, the rows of q and k are multiplied
    by the same random orthogonal matrix before that, so that q · kᵀ stays as it is::

        rotated = (x * signs) @ H / sqrt(p),  numbers = e4m3(rotated / descale)

    Args:
        q: (B, S_q, H_q, D), float16 or bfloat16, on the CPU also float32; D is a multiple of 8 up to 256.
        k: (B, S_k, H_k, D), of q's dtype and device.
        v: (B, S_k, H_k, D_v), likewise; never rotated.
        block: 64 or 128 rows.
        rotate: whether to rotate q and k. H is the Hadamard matrix of side p, the largest power of two that divides D;
            where p < D, it multiplies each p neighbouring elements by themselves. Rotary embeddings come before that.
        seed: of the signs, 1 or -1 for each of D elements: an integer of 64 bits. Queries meet keys that
            were rotated with the same seed.

    Returns:
        Quantized(q, k, v, q_descale, k_descale, v_descale): contiguous numbers, float8_e4m3fn, of the given shapes, and
        for each block its descale, float32: (B, H_q, ceil(S_q / block)) for q, (B, H_k, ceil(S_k / block)) for k and v.
        The same bits on every device, but for the sign of NaN.

        A block of zeros has descale 0. NaN stays NaN and an infinite element becomes NaN, with a rotation each time
        with the p elements around it; neither counts for the descale. There are no gradients.

    Raises:
        TypeError: an argument is no dense tensor, or of another dtype.
        ValueError: shapes, devices or ``block`` break the rules above.
        NotImplementedError: D or D_v is no multiple of 8, or above 256.

    Example:
        >>> import torch
        >>> from flashtile import fp8
        >>> q, k, v = torch.randn(3, 1, 200, 4, 64)
        >>> x = fp8.quantize(q, k, v)
        >>> x.q.dtype, x.q_descale.shape
        (torch.float8_e4m3fn, torch.Size([1, 4, 2]))
        >>> error = fp8.dequantize(x.v, x.v_descale) - v
        >>> bool(error.abs().max() <= v.abs().max() / 16)
        True

    Source: FlashAttention-3 (arXiv:2407.08608), section 3.3; the rotation is that of QuIP (Chee et al. 2023,
    arXiv:2307.13304).
    """
    _check(q, k, v, block)
    of = torch.ops.flashtile.quantize if is_compiling() else _quantize
    seeds = (seed, seed, None) if rotate else (None,) * 3
    results = [of(x.detach(), block, of_x) for x, of_x in zip((q, k, v), seeds, strict=True)]
    numbers, descales = zip(*results, strict=True)
    return Quantized(*numbers, *descales)


def dequantize(x: Tensor, descale: Tensor) -> Tensor:
    """The numbers that :func:`quantize` rounded to, float32 and of x's shape; q and k stay rotated.

    Args:
        x: (B, S, H, D), float8_e4m3fn.
        descale: (B, H, ceil(S / block)), float32. The number of blocks says how long they are.

    Raises:
        ValueError: x has another shape, or descale does not fit it for any block of 64 or 128 rows.

    Example:
        >>> import torch
        >>> from flashtile import fp8
        >>> ones = torch.ones(1, 3, 2, 8)
        >>> x = fp8.quantize(ones, ones, ones, rotate=False)
        >>> torch.equal(fp8.dequantize(x.q, x.q_descale), ones)
        True
    """
    if x.dim() != 4:
        raise ValueError(f"dequantize: x has shape {tuple(x.shape)}, expected (B, S, H, D)")
    if all(descale.shape != _shape_of_descale(x, block) for block in BLOCKS):
        expected = " or ".join(str(_shape_of_descale(x, block)) for block in BLOCKS)
        raise ValueError(f"dequantize: descale has shape {tuple(descale.shape)}, expected {expected}")
    return dequantized(x, descale)


def _check(q: Tensor, k: Tensor, v: Tensor, block: int) -> None:
    require_tensors(_FUNCTION, q=q, k=k, v=v)
    for name, x in dict(q=q, k=k, v=v).items():
        if x.dim() != 4:
            raise ValueError(f"{_FUNCTION}: {name} has shape {tuple(x.shape)}, expected (B, S, H, D)")
        dtypes = DTYPES.get(x.device.type, ())
        if x.dtype not in dtypes:
            expected = " or ".join(str(dtype) for dtype in dtypes) or "a tensor on the CPU or a CUDA device"
            raise TypeError(f"{_FUNCTION}: {name} has dtype {x.dtype} on {x.device}, expected {expected}")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"{_FUNCTION}: {name} is {x.dtype} on {x.device}, expected {q.dtype} on {q.device}, as q")
        if x.shape[-1] % 8 or not 8 <= x.shape[-1] <= WIDEST:
            raise NotImplementedError(
                f"{_FUNCTION}: {name} has head dimension {x.shape[-1]}, expected a multiple of 8 up to {WIDEST}"
            )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{_FUNCTION}: k has shape {tuple(k.shape)}, expected B and D of q, {tuple(q.shape)}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{_FUNCTION}: v has shape {tuple(v.shape)}, expected (B, S_k, H_k) of k, {tuple(k.shape)}")
    if block not in BLOCKS:
        raise ValueError(f"{_FUNCTION}: block is {block!r}, expected {' or '.join(map(str, BLOCKS))}")


def _shape_of_descale(x: Tensor, block: int) -> tuple[int, int, int]:
    batch, rows, heads, _ = x.shape
    return batch, heads, (rows + block - 1) // block


def _new_results(x: Tensor, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(_shape_of_descale(x, block), dtype=torch.float32)


def _quantize(x: Tensor, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """(numbers, descale), rotated by the signs of the seed if there is one."""
    if not x.is_cuda:
        return _by_torch(x, block, seed)
    batch, rows, heads, head_dim = x.shape
    four = x.new_empty((batch, rows, heads, head_dim // 4), dtype=torch.int32)  # DLPack knows no e4m3
    descale = x.new_empty(_shape_of_descale(x, block), dtype=torch.float32)
    rest = (four, descale, block, seed is not None, _signs(seed))
    try:
        _C.quantize(_FUNCTION, x, *rest)
    except _C.Unreadable:
        _C.quantize(_FUNCTION, readable(x), *rest)
    return four.view(E4M3), descale


def _by_torch(x: Tensor, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """The same by operators of PyTorch: what the kernel computes, in its order, so to the same bits."""
    (batch, heads, blocks), rows, head_dim = _shape_of_descale(x, block), x.shape[1], x.shape[3]
    x, side = x.float(), 1
    if seed is not None:
        signs = torch.tensor([word >> bit & 1 for word in _signs(seed) for bit in range(_WORD)][:head_dim])
        x, side = x * (1.0 - 2.0 * signs), head_dim & -head_dim
        bit = 1
        while bit < side:
            a, b = x.unflatten(-1, (head_dim // (2 * bit), 2, bit)).unbind(-2)
            x = torch.stack((a + b, a - b), -2).flatten(-3)
            bit *= 2
    x = torch.where(x.isfinite(), x, math.nan)
    of_blocks = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * block - rows)).unflatten(1, (blocks, block))
    largest = (
        torch.where(of_blocks.isnan(), 0.0, of_blocks.abs()).amax((2, 4))
        if x.numel()
        else x.new_zeros(batch, blocks, heads)
    )
    descale = torch.where(largest == 0, 0.0, (largest / _LARGEST).clamp_min(_LEAST))
    scale = torch.where(largest == 0, 0.0, 1 / descale)[:, :, None, :, None]
    numbers = (of_blocks * scale).flatten(1, 2)[:, :rows].to(E4M3)
    of_rotation = torch.tensor(side, dtype=torch.float32).sqrt().reciprocal()
    return numbers.contiguous(), (descale * of_rotation).transpose(1, 2).contiguous()


def _signs(seed: int | None) -> tuple[int, ...]:
    """A bit for each element of a row, in words of 64: SplitMix64 (Steele et al. 2014) from the seed on."""
    return tuple(_mixed((seed or 0) + 0x9E3779B97F4A7C15 * (i + 1)) for i in range(WIDEST // _WORD))


def _mixed(x: int) -> int:
    mask = 2**_WORD - 1
    x = ((x & mask) ^ (x & mask) >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


define("quantize", "Tensor x, int block, int? seed", "(Tensor numbers, Tensor descale)", _quantize, _new_results)
