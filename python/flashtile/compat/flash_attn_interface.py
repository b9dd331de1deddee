"""``flash_attn_interface``, FlashAttention-3: its public functions, with its parameters, computed by flashtile.

What :mod:`flashtile.compat.flash_attn` says of softmax_scale, causal, window_size, softcap, deterministic, dtypes and
head dimensions holds here too. Besides:

- num_splits, in flash_attn_func and flash_attn_varlen_func, pack_gqa, sm_margin, scheduler_metadata, max_seqlen_q and
  max_seqlen_k: how results are computed, not which. They have no effect.
- attention_chunk: with a number above 0, a query sees only the keys of its own chunk: key j where ⌊j / attention_chunk⌋
  is that of the key on the query's diagonal. Each chunk is computed as a sequence of its own.
- q_descale, k_descale, v_descale: (B, H_k), float32, of q, k and v of dtype float8_e4m3fn: what their numbers have to
  be multiplied with; None: 1. Out is bfloat16 then, and there are no gradients. As in the original, they have no effect
  on numbers of 16 bits.
- qv other than None raises NotImplementedError.
- return_attn_probs: return (out, softmax_lse). As in the original, there are no probabilities.

>>> import torch
>>> from flashtile.compat.flash_attn_interface import flash_attn_func
>>> q = torch.randn(2, 100, 8, 64)
>>> k, v = torch.randn(2, 2, 120, 2, 64)
>>> out, softmax_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
>>> out.shape, softmax_lse.shape
(torch.Size([2, 100, 8, 64]), torch.Size([2, 8, 100]))
"""

import sys

import torch
from torch import Tensor

from ..combine import combine
from ._cache import attend_cache
from ._common import (
    WindowSize,
    described,
    flag,
    refuse_unserved,
    require_tensors,
    unpacked_heads,
    written,
)
from ._passes_3 import _flash_attn_backward as _flash_attn_backward
from ._passes_3 import _flash_attn_forward as _flash_attn_forward
from ._passes_3 import forward, nothing_kept

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Result = Tensor | tuple[Tensor, Tensor]

flash_attn_interface = sys.modules[__name__]  # a package, flash_attn_3, has its functions in a module of this name


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flashtile.attention`. Options are those of this module.

    Args:
        q: (B, S_q, H_q, D).
        k: (B, S_k, H_k, D). H_q is a multiple of H_k.
        v: (B, S_k, H_k, D_v).

    Returns:
        out, (B, S_q, H_q, D_v); or (out, softmax_lse), with softmax_lse (B, H_q, S_q). Both are differentiable.

    Raises:
        NotImplementedError: qv is given.
    """
    function = "flash_attn_func"
    refuse_unserved(function, qv=qv)
    return forward(
        function,
        q,
        k,
        v,
        attention_chunk=attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of qkv, (B, S, 3, H, D); with ``num_heads_q`` = H_q (B, S, H_q + 2 · H_k, D), the heads
    of q, k and v one behind the other."""
    function = "flash_attn_qkvpacked_func"
    q, k, v = unpacked_heads(function, qkv, num_heads_q)
    return forward(
        function,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flashtile.attention_varlen`. Options are those of this module.

    Args:
        q: (T_q, H_q, D); without ``cu_seqlens_q`` (B, S_q, H_q, D).
        k: (T_k, H_k, D); without ``cu_seqlens_k`` (B, S_k, H_k, D). H_q is a multiple of H_k.
        v: (T_k, H_k, D_v), or (B, S_k, H_k, D_v).
        cu_seqlens_q: (B + 1), int32, on q's device: where each sequence begins, and where the last one ends. None: all
            are of one length.
        cu_seqlens_k: (B + 1), the same for keys and values.
        seqused_q: (B), int32: how many rows of each sequence count, from its first one; by default all. The others have
            out = 0, softmax_lse = -inf and gradients 0.
        seqused_k: (B), the same for keys and values.

    Returns:
        out, (T_q, H_q, D_v); or (out, softmax_lse), with softmax_lse (H_q, T_q); without ``cu_seqlens_q``
        (B, S_q, H_q, D_v) and (B, H_q, S_q). Both are differentiable.

    Raises:
        NotImplementedError: qv is given.
    """
    function = "flash_attn_varlen_func"
    refuse_unserved(function, qv=qv)
    tables = dict(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    return forward(
        function,
        q,
        k,
        v,
        attention_chunk=attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        tables=tables,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """:func:`flashtile.attention_kvcache`. What :func:`flashtile.compat.flash_attn.flash_attn_with_kvcache` says of its
    arguments holds here, page_table being block_table. Besides:

    Args:
        q: over caches of 8-bit numbers of 16 bits, or of dtype float8_e4m3fn: then out is bfloat16, and scores are
            multiplied with q_descale, as with k_descale. Where k is given, or k_descale has a number for each row, q is
            multiplied instead, in float32, and rounded to bfloat16.
        k: over caches of 8-bit numbers of q's 16 bits; or, as v, of the caches' dtype: then these numbers are appended
            as they are, whatever the descales, by a call of its own.
        k_descale: of the caches, in any shape that :func:`flashtile.attention_kvcache` takes, as v_descale.
        rotary_cos: (positions, R / 2): an attention_chunk gives each row of q a position of its own, as a window_size.
        cu_seqlens_q: (B + 1), int32: q is ragged, (T_q, H_q, D).
        cu_seqlens_k_new: (B + 1), int32: k and v are ragged, (T_new, H_k, D) and (T_new, H_k, D_v). Where q is ragged
            too and this is another tensor than cu_seqlens_q, they are appended by a call of its own.
        rotary_seqlens: (B), int32: the position of each sequence's first query and new key, instead of the number of
            rows held.

    Returns:
        out, (B, S_q, H_q, D_v), or (T_q, H_q, D_v); with ``return_softmax_lse`` (out, softmax_lse, out_accum,
        softmax_lse_accum), with softmax_lse (B, H_q, S_q), or (H_q, T_q). The last two have no element, as in the
        original where keys are not divided.

    Raises:
        ValueError: k without cache_seqlens, rotary_cos without k, or on the CPU a position that rotary_cos lacks.
        NotImplementedError: qv is given; or a gradient is asked for; or, when traced by torch.compile, an input
            requires one.
    """
    function = "flash_attn_with_kvcache"
    refuse_unserved(function, qv=qv)
    return_softmax_lse = flag(function, "return_softmax_lse", return_softmax_lse)
    result = attend_cache(
        function,
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        block_table=page_table,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )
    return (*result, *nothing_kept(result[1])) if return_softmax_lse else result


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`flashtile.combine`: attention over all keys, from the results over N parts of them.

    Args:
        out_partial: (N, B, S_q, H_q, D_v), any floating dtype.
        lse_partial: (N, B, S_q, H_q): heads last, unlike the softmax_lse of the other functions.
        out: (B, S_q, H_q, D_v): written in place, if it is given.
        out_dtype: of out; by default that of ``out``, or else of ``out_partial``.

    Returns:
        (out, softmax_lse), with softmax_lse (B, S_q, H_q), float32.

    Raises:
        TypeError: dtypes break the rules above, or ``out`` has another dtype than out_dtype.
        ValueError: shapes or devices break the rules above, or elements of ``out`` are one in memory.
        NotImplementedError: ``out`` requires a gradient, where gradients are enabled.
    """
    function = "flash_attn_combine"
    require_tensors(function, out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() not in (4, 5) or len(out_partial) == 0:
        expected = "(N, B, S_q, H_q, D_v) with N of at least 1"
        raise ValueError(f"{function}: out_partial has shape {tuple(out_partial.shape)}, expected {expected}")
    if lse_partial.shape != out_partial.shape[:-1]:
        expected = f"{tuple(out_partial.shape[:-1])} = (N, B, S_q, H_q)"
        raise ValueError(f"{function}: lse_partial has shape {tuple(lse_partial.shape)}, expected {expected}")
    if not out_partial.is_floating_point():
        raise TypeError(f"{function}: out_partial has dtype {out_partial.dtype}, expected a floating dtype")
    if not lse_partial.is_floating_point() or lse_partial.element_size() == 1:
        expected = "a floating dtype of more than 8 bits"
        raise TypeError(f"{function}: lse_partial has dtype {lse_partial.dtype}, expected {expected}")
    if lse_partial.device != out_partial.device:
        raise ValueError(f"{function}: lse_partial is on {lse_partial.device}, expected {out_partial.device}")
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point):
        raise TypeError(f"{function}: out_dtype is {described(out_dtype)}, expected a floating torch.dtype")
    if out is not None:
        require_tensors(function, out=out)
        if out_dtype not in (None, out.dtype):
            raise TypeError(f"{function}: out has dtype {out.dtype}, expected {out_dtype} = out_dtype")
        if not out.is_floating_point():
            raise TypeError(f"{function}: out has dtype {out.dtype}, expected a floating dtype")
        out_dtype = out.dtype
    result, lse = combine(out_partial, lse_partial.transpose(-1, -2))
    result, lse = result.to(out_dtype or result.dtype), lse.transpose(-1, -2)
    return written(function, "out", out, result), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Something to pass on as ``scheduler_metadata``: flashtile plans each call by itself, and nothing depends on it.

    Returns:
        (0), int32, on cache_seqlens' device.

    Raises:
        TypeError: ``cache_seqlens`` is no tensor.
    """
    require_tensors("get_scheduler_metadata", cache_seqlens=cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)
