"""``flash_attn_interface``, FlashAttention-3: its public functions, with its parameters, computed by flashtile.

What :mod:`flashtile.compat.flash_attn` says of softmax_scale, causal, window_size, softcap, deterministic, dtypes and
head dimensions holds here too. Besides:

- num_splits, in flash_attn_func and flash_attn_varlen_func, pack_gqa, sm_margin, scheduler_metadata, max_seqlen_q and
  max_seqlen_k: how results are computed, not which. They have no effect.
- qv, q_descale, k_descale, v_descale, rotary_seqlens other than None, and attention_chunk other than 0 raise
  NotImplementedError.
- return_attn_probs: return (out, softmax_lse). As in the original, there are no probabilities.

>>> import torch
>>> from flashtile.compat.flash_attn_interface import flash_attn_func
>>> q = torch.randn(2, 100, 8, 64)
>>> k, v = torch.randn(2, 2, 120, 2, 64)
>>> out, softmax_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
>>> out.shape, softmax_lse.shape
(torch.Size([2, 100, 8, 64]), torch.Size([2, 8, 100]))
"""

import torch
from torch import Tensor

from ..attention import attention
from ..combine import combine
from ..varlen import attention_varlen
from ._common import WindowSize, attend, attend_cache, refuse, refuse_unserved, require_tensors, unpacked

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
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
        NotImplementedError: qv, a descale or attention_chunk is given.
    """
    unserved = dict(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse_unserved("flash_attn_func", attention_chunk, **unserved)
    return attend(
        attention,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
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
    refuse_unserved(function, attention_chunk, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if num_heads_q is None:
        q, k, v = unpacked(function, "qkv", qkv, "(B, S, 3, H, D)")
    else:
        require_tensors(function, qkv=qkv)
        heads = qkv.shape[2] - num_heads_q if qkv.dim() == 4 else -1
        if heads < 0 or heads % 2 != 0:
            expected = f"(B, S, H_q + 2 · H_k, D), H_q being num_heads_q = {num_heads_q}"
            raise ValueError(f"{function}: qkv has shape {tuple(qkv.shape)}, expected {expected}")
        q, k, v = qkv.split([num_heads_q, heads // 2, heads // 2], dim=2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
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
        q: (T_q, H_q, D).
        k: (T_k, H_k, D). H_q is a multiple of H_k.
        v: (T_k, H_k, D_v).
        cu_seqlens_q: (B + 1), int32, on q's device: where each sequence begins, and where the last one ends.
        cu_seqlens_k: (B + 1), the same for keys and values.
        seqused_q: (B), int32: how many rows of each sequence count, from its first one; by default all. The others have
            out = 0, softmax_lse = -inf and gradients 0.
        seqused_k: (B), the same for keys and values.

    Returns:
        out, (T_q, H_q, D_v); or (out, softmax_lse), with softmax_lse (H_q, T_q). Both are differentiable.

    Raises:
        NotImplementedError: qv, a descale or attention_chunk is given.
    """
    unserved = dict(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse_unserved("flash_attn_varlen_func", attention_chunk, **unserved)
    return attend(
        attention_varlen,
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
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
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
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
        cu_seqlens_q: (B + 1), int32: q is ragged, (T_q, H_q, D), and so are k and v, (T_q, H_k, D) and (T_q, H_k, D_v).
        cu_seqlens_k_new: the same tensor as cu_seqlens_q, if k is given: a sequence has as many new keys as queries.

    Returns:
        out, (B, S_q, H_q, D_v), or (T_q, H_q, D_v); with ``return_softmax_lse`` the pair (out, softmax_lse), with
        softmax_lse (B, H_q, S_q), or (H_q, T_q).

    Raises:
        ValueError: k without cache_seqlens, or rotary_cos without k.
        NotImplementedError: qv, a descale, attention_chunk or rotary_seqlens is given, or another cu_seqlens_k_new; or
            rotary_cos in cases that are not served; or inputs require a gradient where gradients are enabled.
    """
    function = "flash_attn_with_kvcache"
    unserved = dict(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, rotary_seqlens=rotary_seqlens)
    refuse_unserved(function, attention_chunk, **unserved)
    if cu_seqlens_k_new is not cu_seqlens_q and not (k is None and cu_seqlens_k_new is None):
        found = "None" if cu_seqlens_k_new is None else "another tensor than cu_seqlens_q"
        refuse(function, "cu_seqlens_k_new", found, "None" if cu_seqlens_q is None else "cu_seqlens_q itself")
    return attend_cache(
        function,
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        block_table=page_table,
        rotary_cos=rotary_cos,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        cu_seqlens_q=cu_seqlens_q,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )


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
        TypeError: ``out`` has another dtype than out_dtype.
        ValueError: shapes break the rules above.
    """
    require_tensors("flash_attn_combine", lse_partial=lse_partial)
    if out is not None:
        require_tensors("flash_attn_combine", out=out)
    if out is not None and out_dtype not in (None, out.dtype):
        raise TypeError(f"flash_attn_combine: out has dtype {out.dtype}, expected {out_dtype} = out_dtype")
    result, lse = combine(out_partial, lse_partial.transpose(-1, -2))
    if out is None:
        return result.to(out_dtype or result.dtype), lse.transpose(-1, -2)
    if out.shape != result.shape:
        expected = f"{tuple(result.shape)} = (B, S_q, H_q, D_v)"
        raise ValueError(f"flash_attn_combine: out has shape {tuple(out.shape)}, expected {expected}")
    return out.copy_(result), lse.transpose(-1, -2)
