"""Queries, keys and values as fp8 numbers (e4m3), each block of rows, or each sequence, with a scale of its own.

FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.3) rounds them so: e4m3 has three bits of mantissa, and
few large elements would leave the others of a tensor next to none. A scale for each block confines them to it, and a
random rotation of queries and keys, which leaves their products as they are, spreads them over the row.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _C
from ._core import DTYPES, WIDEST, check_begins, is_compiling, readable, refuse_flag, require_tensors
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


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int = 128,
    rotate: bool = True,
    seed: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Quantized:
    """Rounds queries, keys and values to fp8.

    Each block of ``block`` neighbouring rows of a head is divided by its descale, its largest magnitude over 448, the
    largest number of e4m3, and rounded to nearest, ties to even. With ``rotate``, the rows of q and k are multiplied
    by the same random orthogonal matrix before that, so that q · kᵀ stays as it is::

        rotated = (x * signs) @ H / sqrt(p),  numbers = e4m3(rotated / descale)

    With ``cu_seqlens_q`` and ``cu_seqlens_k`` the batch is ragged, as that of :func:`flashtile.attention_varlen`, which
    takes a descale for each sequence and head: the rows of a sequence are one block. A GPU reads them twice then.

    Args:
        q: (B, S_q, H_q, D), float16 or bfloat16, on the CPU also float32; D is a multiple of 8 up to 256. Of a ragged
            batch (T_q, H_q, D).
        k: (B, S_k, H_k, D) or (T_k, H_k, D), of q's dtype and device.
        v: (B, S_k, H_k, D_v) or (T_k, H_k, D_v), likewise; never rotated.
        block: 64 or 128 rows, of a dense batch.
        rotate: whether to rotate q and k. H is the Hadamard matrix of side p, the largest power of two that divides D;
            where p < D, it multiplies each p neighbouring elements by themselves, and sums that many in float32: from
            3.4e38 / p on, elements may give NaN. Rotary embeddings come before that.
        seed: of the signs, 1 or -1 for each of D elements: an integer of 64 bits, from -2^63 to 2^64 - 1. Queries meet
            keys that were rotated with the same seed.
        cu_seqlens_q: (B + 1), int32, contiguous, on q's device: where each sequence of queries begins, and where the
            last one ends. Starts at 0, never decreases, ends at T_q or before. Sequences may be empty, B may be 0.
        cu_seqlens_k: (B + 1), the same for keys and values. Given with cu_seqlens_q, or not at all.

    Returns:
        Quantized(q, k, v, q_descale, k_descale, v_descale): contiguous numbers, float8_e4m3fn, of the given shapes, and
        for each block its descale, float32: (B, H_q, ceil(S_q / block)) for q, (B, H_k, ceil(S_k / block)) for k and v;
        of a ragged batch (B, H_q) and (B, H_k). The same bits on every device, but for the sign of NaN.

        A block of zeros has descale 0, and so has an empty sequence. NaN stays NaN and an infinite element becomes NaN,
        with a rotation each time with the p elements around it; neither counts for the descale. Rows behind the last
        sequence are not looked at: their numbers are 0. There are no gradients.

    Raises:
        TypeError: an argument is no dense tensor, or of another dtype, or an option has the wrong type.
        ValueError: shapes, devices, strides of cu_seqlens, ``block`` or ``seed`` break the rules above; on the CPU also
            what cu_seqlens hold. On CUDA the host does not read them: values that break the rules give unspecified
            results there, but nothing outside the tensors is read or written.
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
        >>> cu_seqlens = torch.tensor([0, 150, 200], dtype=torch.int32)
        >>> x = fp8.quantize(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        >>> x.q.shape, x.q_descale.shape
        (torch.Size([200, 4, 64]), torch.Size([2, 4]))

    Source: FlashAttention-3 (arXiv:2407.08608), section 3.3; the rotation is that of QuIP (Chee et al. 2023,
    arXiv:2307.13304).
    """
    ragged = cu_seqlens_q is not None or cu_seqlens_k is not None
    block = _checked_block(block)
    _check(q, k, v, ragged)
    q, k, v = (x.detach() for x in (q, k, v))
    if rotate is not True and rotate is not False:
        refuse_flag(_FUNCTION, "rotate", rotate)
    of_q_and_k = _checked_seed(seed) if rotate else None
    if not ragged:
        of = _quantize_operator if is_compiling() else _quantize
        return Quantized(*of(q, k, v, block, of_q_and_k))
    begins = _check_begins(q, cu_seqlens_q, cu_seqlens_k)
    of_one = _quantize_ragged_operator if is_compiling() else _quantize_ragged
    given = zip((q, k, v), begins, "qkk", (of_q_and_k, of_q_and_k, None), strict=True)
    numbers, descales = zip(*(of_one(*arguments) for arguments in given), strict=True)
    return Quantized(*numbers, *descales)


def dequantize(x: Tensor, descale: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """The numbers that :func:`quantize` rounded to, float32 and of x's shape; q and k stay rotated.

    Args:
        x: (B, S, H, D), float8_e4m3fn; of a ragged batch (T, H, D).
        descale: (B, H, ceil(S / block)), float32. The number of blocks says how long they are. Of a ragged batch
            (B, H).
        cu_seqlens: (B + 1), int32: where the sequences of a ragged batch begin, and where the last one ends.

    Raises:
        TypeError: an argument is no dense tensor.
        ValueError: x has another shape, or descale does not fit it, for any block of 64 or 128 rows.

    Example:
        >>> import torch
        >>> from flashtile import fp8
        >>> ones = torch.ones(1, 3, 2, 8)
        >>> x = fp8.quantize(ones, ones, ones, rotate=False)
        >>> torch.equal(fp8.dequantize(x.q, x.q_descale), ones)
        True
    """
    require_tensors("dequantize", x=x, descale=descale)
    _check_rank("dequantize", "x", x, cu_seqlens is not None)
    if cu_seqlens is not None:
        require_tensors("dequantize", cu_seqlens=cu_seqlens)
        shape = cu_seqlens.numel() - 1, x.shape[1]
        if descale.shape != shape:
            raise ValueError(f"dequantize: descale has shape {tuple(descale.shape)}, expected {shape} = (B, H)")
        return dequantized(x, descale, cu_seqlens)
    if all(descale.shape != _shape_of_descale(x, block) for block in BLOCKS):
        expected = " or ".join(str(_shape_of_descale(x, block)) for block in BLOCKS)
        raise ValueError(f"dequantize: descale has shape {tuple(descale.shape)}, expected {expected}")
    return dequantized(x, descale)


def _checked_seed(seed: Any) -> int:
    """The seed as operators take it: the upper half of 64 bits becomes negative numbers, which give the same signs."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"{_FUNCTION}: seed is {_C.described(seed)}, expected an int") from None
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{_FUNCTION}: seed is {_C.described(seed)}, expected an int from -2^63 to 2^64 - 1")
    return number - 2**64 if number >= 2**63 else number


def _checked_block(block: Any) -> int:
    expected = " or ".join(map(str, BLOCKS))
    try:
        number = operator.index(block)
    except (TypeError, RuntimeError):
        raise TypeError(f"{_FUNCTION}: block is {_C.described(block)}, expected {expected}") from None
    if number not in BLOCKS:
        raise ValueError(f"{_FUNCTION}: block is {_C.described(block)}, expected {expected}")
    return number


def _check_rank(function: str, name: str, x: Tensor, ragged: bool) -> None:
    if x.dim() != (3 if ragged else 4):
        expected = "(T, H, D)" if ragged else "(B, S, H, D)"
        raise ValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected {expected}")


def _check(q: Tensor, k: Tensor, v: Tensor, ragged: bool) -> None:
    require_tensors(_FUNCTION, q=q, k=k, v=v)
    for name, x in dict(q=q, k=k, v=v).items():
        _check_rank(_FUNCTION, name, x, ragged)
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
    if q.shape[-1] != k.shape[-1] or not (ragged or q.shape[0] == k.shape[0]):
        names = "D" if ragged else "B and D"
        raise ValueError(f"{_FUNCTION}: k has shape {tuple(k.shape)}, expected {names} of q, {tuple(q.shape)}")
    if k.shape[:-1] != v.shape[:-1]:
        names = "(T_k, H_k)" if ragged else "(B, S_k, H_k)"
        raise ValueError(f"{_FUNCTION}: v has shape {tuple(v.shape)}, expected {names} of k, {tuple(k.shape)}")


def _check_begins(q: Tensor, of_q: Any, of_k: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v. Their numbers are checked where they are at hand."""
    given = dict(cu_seqlens_q=of_q, cu_seqlens_k=of_k)
    require_tensors(_FUNCTION, **given)
    for name, begins in given.items():
        shape, fits = tuple(begins.shape), begins.dim() == 1 and begins.numel() > 0
        if not fits or begins.numel() != of_q.numel():
            expected = "(B + 1)" if not fits else f"{tuple(of_q.shape)} = (B + 1)"
            raise ValueError(f"{_FUNCTION}: {name} has shape {shape}, expected {expected}")
        if begins.dtype != torch.int32:
            raise TypeError(f"{_FUNCTION}: {name} has dtype {begins.dtype}, expected torch.int32")
        if begins.device != q.device:
            raise ValueError(f"{_FUNCTION}: {name} is on {begins.device}, expected {q.device}, as q")
        if not begins.is_contiguous():
            raise ValueError(f"{_FUNCTION}: {name} has strides {begins.stride()}, expected a contiguous tensor")
    return of_q, of_k, of_k


def _shape_of_descale(x: Tensor, block: int) -> tuple[int, int, int]:
    batch, rows, heads, _ = x.shape
    return batch, heads, (rows + block - 1) // block


def _new_results(q: Tensor, k: Tensor, v: Tensor, block: int, seed: int | None) -> tuple[Tensor, ...]:
    numbers = (x.new_empty(x.shape, dtype=E4M3) for x in (q, k, v))
    return *numbers, *(x.new_empty(_shape_of_descale(x, block), dtype=torch.float32) for x in (q, k, v))


def _new_ragged_results(x: Tensor, begins: Tensor, side: str, seed: int | None) -> tuple[Tensor, Tensor]:
    shape = begins.shape[0] - 1, x.shape[1]
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(shape, dtype=torch.float32)


def _quantize(q: Tensor, k: Tensor, v: Tensor, block: int, seed: int | None) -> tuple[Tensor, ...]:
    """Numbers and descales, those of q and k rotated by the signs of the seed if there is one."""
    tensors = q, k, v
    if not q.is_cuda:
        results = [_by_torch(x, block, of_x) for x, of_x in zip(tensors, (seed, seed, None), strict=True)]
        numbers, descales = zip(*results, strict=True)
        return *numbers, *descales
    fours = tuple(_four(x) for x in tensors)
    descales = tuple(x.new_empty(_shape_of_descale(x, block), dtype=torch.float32) for x in tensors)
    rest = (fours, descales, block, seed is not None, _signs(seed))
    try:
        _C.quantize(_FUNCTION, tensors, *rest)
    except _C.Unreadable:
        _C.quantize(_FUNCTION, (readable(q), readable(k), readable(v)), *rest)
    return *(four.view(E4M3) for four in fours), *descales


def _quantize_ragged(x: Tensor, begins: Tensor, side: str, seed: int | None) -> tuple[Tensor, Tensor]:
    """(numbers, descale) of the queries or the keys of a ragged batch, as `side` says."""
    if not x.is_cuda:
        return _ragged_by_torch(x, begins, side, seed)
    four, shape = _four(x), (begins.shape[0] - 1, x.shape[1])
    descale, largest = x.new_zeros(shape, dtype=torch.float32), x.new_zeros(shape, dtype=torch.int32)
    rest = (begins, four, descale, largest, seed is not None, _signs(seed))
    try:
        _C.quantize_ragged(_FUNCTION, x, *rest)
    except _C.Unreadable:
        _C.quantize_ragged(_FUNCTION, readable(x), *rest)
    return four.view(E4M3), descale


def _four(x: Tensor) -> Tensor:
    """Memory for x's numbers, four in each int32: DLPack knows no e4m3."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 4), dtype=torch.int32)


def _by_torch(x: Tensor, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """The same by operators of PyTorch: what the kernel computes, in its order, so to the same bits."""
    (batch, heads, blocks), rows = _shape_of_descale(x, block), x.shape[1]
    x, of_rotation = _rotated(x, seed)
    of_blocks = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * block - rows)).unflatten(1, (blocks, block))
    largest = _magnitudes(of_blocks).amax((2, 4)) if x.numel() else x.new_zeros(batch, blocks, heads)
    descale, scale = _scales(largest)
    numbers = (of_blocks * scale[:, :, None, :, None]).flatten(1, 2)[:, :rows].to(E4M3)
    return numbers.contiguous(), (descale * of_rotation).transpose(1, 2).contiguous()


def _ragged_by_torch(x: Tensor, begins: Tensor, side: str, seed: int | None) -> tuple[Tensor, Tensor]:
    check_begins(_FUNCTION, f"cu_seqlens_{side}", begins, x.shape[0], f"T_{side}")
    lengths, heads = begins.diff().long(), x.shape[1]
    numbers = x.new_zeros(x.shape, dtype=torch.float32)
    sequence = torch.repeat_interleave(lengths)
    x, of_rotation = _rotated(x[: len(sequence)], seed)
    largest = x.new_zeros(len(lengths), heads)
    largest.scatter_reduce_(0, sequence[:, None].expand(-1, heads), _magnitudes(x).amax(-1), "amax")
    descale, scale = _scales(largest)
    numbers[: len(sequence)] = x * scale[sequence, :, None]
    return numbers.to(E4M3), descale * of_rotation


def _rotated(x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """x in float32 without what is infinite, rotated but for a factor, and that factor."""
    x, side, head_dim = x.float(), 1, x.shape[-1]
    if seed is not None:
        signs = torch.tensor([word >> bit & 1 for word in _signs(seed) for bit in range(_WORD)][:head_dim])
        x, side = x * (1.0 - 2.0 * signs), head_dim & -head_dim
        bit = 1
        while bit < side:
            a, b = x.unflatten(-1, (head_dim // (2 * bit), 2, bit)).unbind(-2)
            x = torch.stack((a + b, a - b), -2).flatten(-3)
            bit *= 2
    return torch.where(x.isfinite(), x, math.nan), torch.tensor(side, dtype=torch.float32).sqrt().reciprocal()


def _magnitudes(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0.0, x.abs())


def _scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """(descale, its inverse) of blocks with these largest magnitudes."""
    descale = torch.where(largest == 0, 0.0, (largest / _LARGEST).clamp_min(_LEAST))
    return descale, torch.where(largest == 0, 0.0, 1 / descale)


def _signs(seed: int | None) -> tuple[int, ...]:
    """A bit for each element of a row, in words of 64: SplitMix64 (Steele et al. 2014) from the seed on."""
    return tuple(_mixed((seed or 0) + 0x9E3779B97F4A7C15 * (i + 1)) for i in range(WIDEST // _WORD))


def _mixed(x: int) -> int:
    mask = 2**_WORD - 1
    x = ((x & mask) ^ (x & mask) >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


_quantize_operator = define(
    "quantize",
    "Tensor q, Tensor k, Tensor v, int block, int? seed",
    "(Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale)",
    _quantize,
    _new_results,
)
_quantize_ragged_operator = define(
    "quantize_ragged",
    "Tensor x, Tensor begins, str side, int? seed",
    "(Tensor numbers, Tensor descale)",
    _quantize_ragged,
    _new_ragged_results,
)
