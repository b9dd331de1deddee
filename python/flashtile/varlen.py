"""Ragged batches: attention of sequences that stand one behind the other."""

import operator
from typing import Literal, overload

import torch
from torch import Tensor, dtype

from . import _C
from ._autograd import attend
from ._core import is_compiling
from ._fp8 import fp8_option
from ._max_logits import attend_with_max_logits
from ._misnamed import hides_misnamed, refuse_misnamed
from .attention import Window
from .masks import ColumnMask, ranges_of

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: dtype | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: dtype | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: dtype | None = None,
    out: Tensor | None = None,
    return_lse: bool,
    return_max_logits: Literal[False] = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: dtype | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: Literal[True],
) -> tuple[Tensor, ...]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: dtype | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool,
) -> Tensor | tuple[Tensor, ...]: ...
@hides_misnamed
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: object = ...,  # refused, as the next: see _misnamed.py
    is_causal: object = ...,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: dtype | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention of a ragged batch: B sequences of any lengths, one behind the other, without padding.

    Sequence b has the rows cu_seqlens_q[b] up to cu_seqlens_q[b + 1] of q, and those of k and v that cu_seqlens_k
    names. Its result is that of :func:`attention` of these rows alone::

        rows, keys     = slice(*cu_seqlens_q[b : b + 2]), slice(*cu_seqlens_k[b : b + 2])
        out[rows], ... = attention(q[None, rows], k[None, keys], v[None, keys], ...)

    to the bit on the CPU. So masks are aligned at the bottom right of each sequence: its last query meets its last key.

    Args:
        q: (T_q, H_q, D). float16 or bfloat16; on the CPU also float32; or float8_e4m3fn, which gets no gradient. D is a
            multiple of 8, at most 256.
        k: (T_k, H_k, D), of q's dtype and device. H_q is a multiple of H_k.
        v: (T_k, H_k, D_v). D_v obeys the rule for D and may differ from it.
            q, k and v take any strides with a contiguous last dimension. CUDA kernels read 16 bytes at a time: an
            operand whose address or strides are no multiples of 16 bytes is copied first, and so is one that PyTorch
            negates lazily. Under torch.autocast, q, k and v of several floating dtypes, or of one that no kernel
            serves, are cast to the dtype that it asks for.
        cu_seqlens_q: (B + 1), int32, contiguous, on q's device: where each sequence of queries begins, and where the
            last one ends. Starts at 0, never decreases, ends at T_q or before. Sequences may be empty, B may be 0.
        cu_seqlens_k: (B + 1), the same for keys and values.
        max_seqlen_q: the longest sequence of queries, an int or an integer tensor. Nothing depends on it; other
            libraries ask for it, and callers may pass it on. A tensor is not read.
        max_seqlen_k: the same for keys.
        seqused_q: (B), int32, contiguous, on q's device: how many rows of each sequence count, from its first one; by
            default all. Masks are aligned at the last row and the last key that count.
        seqused_k: (B), the same for keys and values.
        causal: hide columns right of the diagonal.
        mask: a :class:`flashtile.masks.ColumnMask` of these sequences one behind the other, which its `concatenate`
            makes: rows are counted within a sequence. Served as in :func:`attention`.
        window: (left, right), inclusive distances from the diagonal, in tokens; None on a side: unbounded. A negative
            one puts all of the window on the other side: (None, -1) hides a row's own column too, (100, -50) shows the
            columns 50 to 100 behind it. With left + right < 0 no row sees anything.
        scale: factor of the scores, any finite number; by default 1/√D.
        softcap: bound of the scores, in units of scaled scores; 0: none.
        alibi_slopes: float32, (H_q) or (B, H_q), of any strides. Gets no gradient.
        sinks: (H_q), any floating dtype and stride, summed in float32: a logit for each query head that no value
            belongs to. It takes weight from the columns, and gets a gradient.
        dropout_p: the probability, at least 0 and below 1, with which a weight is dropped; 0: none. It is rounded to a
            multiple of 1/256, but not to 0 or 1. Also in backward, where the same weights are dropped. Pass 0 in
            evaluation.
        seed: of dropout, an int from 0 to 2^64 - 1. A weight is dropped by its place (b, h, i, j), where b counts
            sequences and i, j count within one, and the seed alone. By default drawn from PyTorch's CPU generator.
        deterministic: whether the gradients must be the same bits in every run. By default what
            torch.are_deterministic_algorithms_enabled() says when backward runs.
        batch_invariant: as in :func:`attention`, whose bits a sequence gets by itself then on CUDA too. There it goes
            without mask, and but on Hopper without seqused_q where there are sinks and lse is returned.
        q_descale: of q, k and v of dtype float8_e4m3fn, which need not all have one: what their numbers have to be
            multiplied with, float32, of any strides, at least 0: (B, H_q) or (B, H_k), for each sequence and head. See
            docs/fp8.md.
        k_descale: (B, H_k).
        v_descale: likewise.
        out_dtype: the dtype of out, where q, k and v are float8_e4m3fn: bfloat16 (the default) or float16, on the CPU
            also float32.
        out: a tensor for the result, which is returned then: (T_q, H_q, D_v), of the result's dtype, on q's device, of
            any strides with a contiguous last dimension, on CUDA multiples of 16 bytes, and of memory that is not that
            of q, k and v. Kernels write to it at once; only of e4m3 numbers on the CPU, and where PyTorch traces the
            call, the result is copied there. There is no gradient then.
        return_lse: also return lse.
        return_max_logits: also return the largest score of each head over the rows of a sequence that count, as in
            :func:`attention`. Not of float8_e4m3fn.

    Returns:
        out, (T_q, H_q, D_v), contiguous, of q's dtype or out_dtype; with ``return_lse`` the pair (out, lse), where lse
        is the natural logarithm, float32, (H_q, T_q). Both are differentiable with respect to q, k, v and sinks, once.
        With ``return_max_logits`` the last of the results is the largest scores, float32, (B, H_q), -inf where no row
        of a sequence sees a column: (out, max_logits), or (out, lse, max_logits). They carry no gradient.
        A row that sees no column has out = 0, lse = -inf (or the sink) and gradients 0. Rows that do not count, and
        rows behind the last sequence, are never looked at, whatever they hold: out = 0, lse = -inf, gradients 0.

    Raises:
        TypeError: an argument has the wrong type or dtype, such as tables of int64; or it is attn_mask or is_causal,
            which :func:`scaled_dot_product_attention` takes.
        ValueError: shapes, strides, devices or option values break the rules above; on the CPU also what
            cu_seqlens and seqused hold. On CUDA the host does not read them, so that it need not wait and calls can be
            captured in a graph: values that break the rules give unspecified results there, but nothing outside the
            tensors is read or written.
        NotImplementedError: legal, but no kernel serves it (float32 on CUDA, a GPU older than sm_80, what
            batch_invariant goes without, return_max_logits of float8_e4m3fn, slopes that require a gradient, out where
            an input does, nested tensors, forward-mode differentiation).
        RuntimeError: the CUDA runtime failed.

    Example:
        >>> import torch, flashtile
        >>> lengths = torch.tensor([100, 1, 0, 27])
        >>> cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        >>> q = torch.randn(128, 8, 64)
        >>> k, v = torch.randn(2, 128, 2, 64)
        >>> out = flashtile.attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)
        >>> out.shape
        torch.Size([128, 8, 64])
        >>> torch.equal(out[:100], flashtile.attention(q[None, :100], k[None, :100], v[None, :100], causal=True)[0])
        True

    Sources: those of :func:`attention`; batches without padding, ByteTransformer (Zhai et al. 2022,
    arXiv:2210.03052), and in attention itself FlashAttention (Dao et al. 2022, arXiv:2205.14135).
    """
    if attn_mask is not ... or is_causal is not ...:
        refuse_misnamed("attention_varlen", attn_mask)
    if max_seqlen_q is not None:
        _check_length("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None:
        _check_length("max_seqlen_k", max_seqlen_k)
    sequences = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    columns = ranges_of("attention_varlen", mask, q, cu_seqlens_q, ragged=True)
    fp8 = fp8_option(q_descale, k_descale, v_descale, out_dtype)
    scores = (alibi_slopes, sinks, columns, causal, window, scale, softcap)
    options = (*scores, dropout_p, seed, deterministic, batch_invariant, sequences, fp8, None)
    if return_max_logits is not False:
        return attend_with_max_logits("attention_varlen", q, k, v, options, return_lse, return_max_logits, out)
    return attend("attention_varlen", q, k, v, options, return_lse, out)


def _check_length(name, length):
    """Without a look at the value of a tensor, which may be on its way to the device."""
    expected = "an int of at least 0, an integer tensor or None"
    if isinstance(length, Tensor):
        if length.dtype not in _INTEGERS:
            raise TypeError(f"attention_varlen: {name} has dtype {length.dtype}, expected {expected}")
        return
    if is_compiling() and (isinstance(length, int) or getattr(length, "shape", None) == ()):
        return  # a look at the value would tie the graph to it
    try:
        negative = operator.index(length) < 0
    except TypeError:
        raise TypeError(f"attention_varlen: {name} is {_C.described(length)}, expected {expected}") from None
    if negative:
        raise ValueError(f"attention_varlen: {name} is {_C.described(length)}, expected {expected}")
