"""Dense attention."""

from typing import Literal, overload

from torch import Tensor, dtype

from ._autograd import attend
from ._fp8 import fp8_option
from ._max_logits import attend_with_max_logits
from ._misnamed import hides_misnamed, refuse_misnamed
from .masks import ColumnMask, ranges_of

Window = tuple[int | None, int | None] | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: object = ...,  # refused, as the next: see _misnamed.py
    is_causal: object = ...,
    *,
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
    """Exact attention, ``softmax(scale · q kᵀ + mask) v``, without storing the scores.

    For batch b, query head h and query row i, with KV head g = h // (H_q / H_k), diagonal d = i + S_k - S_q::

        s[j]   = scale · q[b, i, h] · k[b, j, g]                       for every visible column j
        s[j]   = softcap · tanh(s[j] / softcap)                        if softcap > 0
        s[j]   = s[j] - alibi_slopes[h] · |j - d|                      if alibi_slopes are given
        lse    = log(Σ_j exp(s[j]) + exp(sinks[h]))                    the sink only if sinks are given
        out    = Σ_j exp(s[j] - lse) · keep[j] / (1 - dropout_p) · v[b, j, g]

    Column j is visible unless ``causal`` and j > d, or ``window=(left, right)`` and not -left ≤ j - d ≤ right, or
    ``mask`` hides row i from it. So the last query row meets the last key: causal and window are aligned at the bottom
    right. Masks intersect.

    Args:
        q: (B, S_q, H_q, D). float16 or bfloat16; on the CPU also float32; or float8_e4m3fn, which gets no gradient. D
            is a multiple of 8, at most 256.
        k: (B, S_k, H_k, D), of q's dtype and device. H_q is a multiple of H_k.
        v: (B, S_k, H_k, D_v). D_v obeys the rule for D and may differ from it.
            q, k and v take any strides with a contiguous last dimension. CUDA kernels read 16 bytes at a time: an
            operand whose address or strides are no multiples of 16 bytes is copied first, and so is one that PyTorch
            negates lazily. Under torch.autocast, q, k and v of several floating dtypes, or of one that no kernel
            serves, are cast to the dtype that it asks for.
        causal: hide columns right of the diagonal.
        window: (left, right), inclusive distances from the diagonal, in tokens; None on a side: unbounded. A negative
            one puts all of the window on the other side: (None, -1) hides a row's own column too, (100, -50) shows the
            columns 50 to 100 behind it. With left + right < 0 no row sees anything.
        mask: a :class:`flashtile.masks.ColumnMask`: for each column the rows that it is hidden from, counted from the
            first.
        scale: factor of the scores, any finite number; by default 1/√D.
        softcap: bound of the scores, in units of scaled scores; 0: none.
        alibi_slopes: float32, (H_q) or (B, H_q), of any strides. Gets no gradient.
        sinks: (H_q), any floating dtype and stride, summed in float32: a logit for each query head that no value
            belongs to. It takes weight from the columns, and gets a gradient.
        dropout_p: the probability, at least 0 and below 1, with which a weight is dropped; 0: none. It is rounded to a
            multiple of 1/256, in the formula as well, but not to 0 or 1. Also in backward, where the same weights are
            dropped. Pass 0 in evaluation.
        seed: of dropout, an int from 0 to 2^64 - 1. A weight is dropped by its place (b, h, i, j) and the seed alone,
            alike on every device. By default drawn from PyTorch's CPU generator, by a compiled function in each run,
            so torch.manual_seed and activation checkpointing repeat it; in a captured CUDA graph it is fixed.
        deterministic: whether the gradients must be the same bits in every run. By default what
            torch.are_deterministic_algorithms_enabled() says when backward runs.
        batch_invariant: whether a row's out and lse must have the bits that :func:`attention_kvcache` gives it with
            batch_invariant, whatever else is in the batch, and gradients of q, k and v, which are deterministic then,
            the same alone and beside others. By default what :func:`batch_invariant_mode` says. On the CPU it always
            holds, without dropout. On CUDA backward knows no more of the softmax than lse then. A forward of many rows
            takes many times as long on GPUs other than Hopper, and with a mask: see docs/contract.md.
        q_descale: of q, k and v of dtype float8_e4m3fn, which need not all have one: what their numbers have to be
            multiplied with, float32, of any strides, at least 0: (B, H_q) or (B, H_k) for each head, or (B, H_q or H_k,
            ceil(S_q / block)) for each block of 64 or 128 of its rows. See docs/fp8.md, and
            :func:`flashtile.fp8.quantize`, which makes them.
        k_descale: (B, H_k) or (B, H_k, ceil(S_k / block)).
        v_descale: likewise.
        out_dtype: the dtype of out, where q, k and v are float8_e4m3fn: bfloat16 (the default) or float16, on the CPU
            also float32.
        out: a tensor for the result, which is returned then: (B, S_q, H_q, D_v), of the result's dtype, on q's device,
            of any strides with a contiguous last dimension, on CUDA multiples of 16 bytes, and of memory that is not
            that of q, k and v. Kernels write to it at once; only of e4m3 numbers on the CPU, and where PyTorch traces
            the call, the result is copied there. There is no gradient then.
        return_lse: also return lse.
        return_max_logits: also return the largest s[j] of each head over the rows of an entry, exactly, for QK-Clip and
            its kin. Neither sinks nor dropout count. Not of float8_e4m3fn.

    Returns:
        out, (B, S_q, H_q, D_v), contiguous, of q's dtype or out_dtype; with ``return_lse`` the pair (out, lse), where
        lse is the natural logarithm, float32, (B, H_q, S_q). Both are differentiable with respect to q, k, v and sinks,
        once. With ``return_max_logits`` the last of the results is the largest scores, float32, (B, H_q), -inf where no
        row sees a column: (out, max_logits), or (out, lse, max_logits). They carry no gradient.
        Sums and softmax statistics are float32. On CUDA the parts of dq add up in no fixed order unless
        ``deterministic``, so its last bits may differ from run to run (on Hopper, where D or D_v is above 128, only if
        few queries see many keys); everything else repeats to the bit. A row that sees no column has out = 0, lse =
        -inf (or the sink) and gradients 0.

    Raises:
        TypeError: an argument has the wrong type or dtype; or it is attn_mask or is_causal, which
            :func:`scaled_dot_product_attention` takes.
        ValueError: shapes, strides, devices or option values break the rules above.
        NotImplementedError: legal, but no kernel serves it (float32 on CUDA, a GPU older than sm_80, dropout with
            batch_invariant, return_max_logits of float8_e4m3fn, slopes that require a gradient, out where an input
            does, nested tensors, forward-mode differentiation).
        RuntimeError: the CUDA runtime failed.

    Example:
        >>> import torch, flashtile
        >>> q = torch.randn(2, 100, 8, 64)
        >>> k, v = torch.randn(2, 2, 120, 2, 64)
        >>> flashtile.attention(q, k, v, causal=True).shape
        torch.Size([2, 100, 8, 64])
        >>> out, lse = flashtile.attention(q, k, v, window=(64, 0), return_lse=True)
        >>> lse.shape
        torch.Size([2, 8, 100])
        >>> out, largest = flashtile.attention(q, k, v, causal=True, return_max_logits=True)
        >>> largest.shape
        torch.Size([2, 8])

    Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); tiling and recomputation,
    FlashAttention (Dao et al. 2022, arXiv:2205.14135) and FlashAttention-2 (Dao 2023, arXiv:2307.08691); grouped
    queries, Ainslie et al. 2023 (arXiv:2305.13245); ALiBi, Press et al. 2021 (arXiv:2108.12409); sliding window,
    Longformer (Beltagy et al. 2020, arXiv:2004.05150); softcap, Gemma 2 (2024, arXiv:2408.00118); sinks, gpt-oss
    (2025, arXiv:2508.10925); QK-Clip, Kimi K2 (2025, arXiv:2507.20534); dropout's random numbers, Philox 4×32-7
    (Salmon et al. 2011, doi:10.1145/2063384.2063405).
    """
    if attn_mask is not ... or is_causal is not ...:
        refuse_misnamed("attention", attn_mask)
    columns = ranges_of("attention", mask, q)
    fp8 = fp8_option(q_descale, k_descale, v_descale, out_dtype)
    scores = (alibi_slopes, sinks, columns, causal, window, scale, softcap)
    options = (*scores, dropout_p, seed, deterministic, batch_invariant, None, fp8, None)
    if return_max_logits is not False:
        return attend_with_max_logits("attention", q, k, v, options, return_lse, return_max_logits, out)
    return attend("attention", q, k, v, options, return_lse, out)
