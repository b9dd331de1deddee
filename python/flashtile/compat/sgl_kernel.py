"""``sgl_kernel.flash_attn``, SGLang's form of FlashAttention-3: its functions, with its parameters, computed by
flashtile.

What :mod:`flashtile.compat.flash_attn_interface` says of its options holds here too. Besides:

- sinks: (H_q), any floating dtype: a logit for each query head that no value belongs to.
- out: a tensor for the result, which is returned then. Kernels write to it at once, unless D or D_v is no multiple of
  8, or queries are in chunks.
- q_descale: of a q of dtype float8_e4m3fn over a cache of 8-bit numbers; None: 1. Out is bfloat16 then, or of the dtype
  of ``out``.
- attention_chunk: None is 0.
- num_splits of flash_attn_with_kvcache: 1 is batch_invariant=True of :func:`flashtile.attention_kvcache`, as SGLang
  asks for it when inference has to be deterministic. Another number has no effect.
- ver: no effect. max_seqlen_q, max_seqlen_k, scheduler_metadata, pack_gqa, sm_margin: no effect.
- qv, only_qv, score_mod and aux_tensors raise NotImplementedError.

>>> import torch
>>> from flashtile.compat.sgl_kernel import flash_attn_with_kvcache
>>> k_cache, v_cache = torch.randn(2, 20, 1, 2, 64)                        # pages of one row, as SGLang's are
>>> page_table = torch.randperm(20, dtype=torch.int32).view(2, 10)
>>> held = torch.tensor([10, 7], dtype=torch.int32)
>>> begins = torch.tensor([0, 1, 2], dtype=torch.int32)                    # a query for each of 2 sequences
>>> q = torch.randn(2, 8, 64)
>>> sinks = torch.zeros(8)
>>> out, softmax_lse, *rest = flash_attn_with_kvcache(
...     q, k_cache, v_cache, cache_seqlens=held, page_table=page_table, cu_seqlens_q=begins, causal=True, sinks=sinks,
...     return_softmax_lse=True,
... )
>>> out.shape, softmax_lse.shape
(torch.Size([2, 8, 64]), torch.Size([8, 2]))
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ._cache import attend_cache
from ._common import WindowSize, flag, refuse, refuse_unserved
from ._passes_3 import Forward, nothing_kept
from ._serving import attend_sequences, splits_of, unsupported_reason
from .flash_attn_interface import get_scheduler_metadata as _get_scheduler_metadata

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata", "is_fa3_supported"]

Result = Tensor | Forward


def is_fa3_supported(device: torch.device | str | int | None = None) -> bool:
    """Whether flashtile has kernels for this GPU, by default the current one; True where there is none."""
    return unsupported_reason(device) is None


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
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    aux_tensors: list[Tensor] | None = None,
    ver: int = 3,
    out: Tensor | None = None,
) -> Result:
    """:func:`flashtile.compat.flash_attn_interface.flash_attn_with_kvcache`, with the options of this module.

    Args:
        cu_seqlens_k_new: (B + 1), of new keys; no effect without k.

    Returns:
        out, (B, S_q, H_q, D_v), or (T_q, H_q, D_v); with ``return_softmax_lse`` (out, softmax_lse, out_accum,
        softmax_lse_accum), with softmax_lse (B, H_q, S_q), or (H_q, T_q). The last two have no element.
        :func:`flashtile.combine` merges results over parts of the keys, as SGLang's merge_state does.

    Raises:
        NotImplementedError: as this module says; or a gradient is asked for.
    """
    function = "flash_attn_with_kvcache"
    _refuse(function, qv, only_qv, score_mod, aux_tensors)
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
        attention_chunk=0 if attention_chunk is None else attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softcap=softcap,
        sinks=sinks,
        out=out,
        return_lse=return_softmax_lse,
        **splits_of(function, num_splits),
    )
    return (*result, *nothing_kept(result[1])) if return_softmax_lse else result


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    aux_tensors: list[Tensor] | None = None,
    ver: int = 3,
    out: Tensor | None = None,
) -> Result:
    """:func:`flashtile.compat.flash_attn_interface.flash_attn_varlen_func`, with the options of this module.

    Args:
        page_table: (B, pages of a sequence), int32: k and v are (pages, page_size, H_k, D or D_v), of which each
            sequence has ``seqused_k`` rows; ``cu_seqlens_k`` has no effect then.

    Returns:
        out, (T_q, H_q, D_v); with ``return_softmax_lse`` (out, softmax_lse, out_accum, softmax_lse_accum), with
        softmax_lse (H_q, T_q). The last two have no element.

    Raises:
        NotImplementedError: as this module says; or a gradient is asked for, with ``out`` or ``page_table``.
    """
    function = "flash_attn_varlen_func"
    _refuse(function, qv, only_qv, score_mod, aux_tensors)
    return_softmax_lse = flag(function, "return_softmax_lse", return_softmax_lse)
    result = attend_sequences(
        function,
        q,
        k,
        v,
        block_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=0 if attention_chunk is None else attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softcap=softcap,
        sinks=sinks,
        out=out,
        return_lse=return_softmax_lse,
    )
    return (*result, *nothing_kept(result[1])) if return_softmax_lse else result


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
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
    """:func:`flashtile.compat.flash_attn_interface.get_scheduler_metadata`: a tensor of no element, (0), int32."""
    sizes = (batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim)
    return _get_scheduler_metadata(*sizes, cache_seqlens)


def _refuse(function, qv, only_qv, score_mod, aux_tensors):
    refuse_unserved(function, qv=qv, score_mod=score_mod, aux_tensors=aux_tensors)
    if flag(function, "only_qv", only_qv):
        refuse(function, "only_qv", True, False)
