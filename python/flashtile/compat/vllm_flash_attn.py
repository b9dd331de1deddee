"""``vllm.vllm_flash_attn``, which was ``vllm_flash_attn`` by itself once: vLLM's own form of flash-attn, with its
parameters, computed by flashtile.

What :mod:`flashtile.compat.flash_attn` says of softmax_scale, causal, window_size, softcap, dtypes and head dimensions
holds here too. Besides:

- out: a tensor for the result, which is returned then. Kernels write to it at once, unless D or D_v is no multiple of
  8.
- s_aux: (H_q), any floating dtype: attention sinks, a logit for each query head that no value belongs to.
- q_descale, k_descale, v_descale: (B, H_k), float32, of 8-bit numbers: what they have to be multiplied with; None: 1.
  They have no effect on numbers of 16 bits. Out is bfloat16 where q has 8 bits, or of the dtype of ``out``.
- fa_version: 2, 3 or 4. No effect: sinks, ALiBi and 8-bit caches are served on every device, whichever it is.
- max_seqlen_q, max_seqlen_k, scheduler_metadata, deterministic of a forward, return_attn_probs: no effect.
- num_splits over a cache: 1 is batch_invariant=True of :func:`flashtile.attention_kvcache`, as vLLM asks for it when
  results must not depend on the batch. Another number has no effect: flashtile splits keys as they fill the GPU, and
  its plans are good for graphs whatever the lengths are.
- q_v, output_scale, mask_mod, block_sparse_tensors, aux_tensors, dynamic_causal and gather_kv_indices raise
  NotImplementedError unless they are None, and so does a cp_world_size above 1 where masks or ALiBi go by the distance
  of a key from the query.

>>> import torch
>>> from flashtile.compat.vllm_flash_attn import flash_attn_varlen_func
>>> k_cache, v_cache = torch.randn(2, 10, 16, 2, 64)                       # 10 pages of 16 rows
>>> block_table = torch.tensor([[7, 2], [4, 9]], dtype=torch.int32)        # two for each of 2 sequences
>>> begins = torch.tensor([0, 5, 6], dtype=torch.int32)                    # 5 queries and 1
>>> held = torch.tensor([20, 11], dtype=torch.int32)                       # keys, those of the queries too
>>> q = torch.randn(6, 8, 64)
>>> out = torch.empty_like(q)
>>> result = flash_attn_varlen_func(
...     q, k_cache, v_cache, 5, begins, 20, seqused_k=held, block_table=block_table, causal=True, out=out
... )
>>> result is out
True
"""

import sys

import torch
from torch import Tensor

from . import layers
from ._cache import attend_cache
from ._common import WindowSize, flag, refuse, refuse_unserved, window_of
from ._serving import attend_sequences, splits_of, unsupported_reason
from .flash_attn_interface import get_scheduler_metadata as _get_scheduler_metadata

__all__ = [
    "compile_flash_attn_varlen_func_from_specs",
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "is_fa_version_supported",
    "layers",
]

FA2_AVAILABLE = FA3_AVAILABLE = True
FA2_UNAVAILABLE_REASON = FA3_UNAVAILABLE_REASON = None
FA4_AVAILABLE = False
FA4_UNAVAILABLE_REASON = "flashtile computes what vLLM asks of FlashAttention 2 and 3"
DEFAULT_FA_VERSION = 2

Result = Tensor | tuple[Tensor, Tensor]
Device = torch.device | str | int | None

flash_attn_interface = sys.modules[__name__]  # the package has its functions in a module of this name


def fa_version_unsupported_reason(fa_version: int, device: Device = None) -> str | None:
    """Why vLLM should not ask for this version on a GPU, by default the current one, or None: 2 and 3 run on every GPU
    that flashtile has kernels for, and on a CPU where there is no GPU.

    Raises:
        ValueError: there is no such version.
    """
    _check_version("fa_version_unsupported_reason", fa_version)
    return FA4_UNAVAILABLE_REASON if fa_version == 4 else unsupported_reason(device)


def is_fa_version_supported(fa_version: int, device: Device = None) -> bool:
    """Whether :func:`fa_version_unsupported_reason` has none."""
    return fa_version_unsupported_reason(fa_version, device) is None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize | list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: None = None,
    fa_version: int = DEFAULT_FA_VERSION,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: None = None,
    block_sparse_tensors: None = None,
    aux_tensors: None = None,
    aux_tensor_leading_dims: None = None,
    dynamic_causal: None = None,
    gather_kv_indices: None = None,
    gather_kv_valid_length: None = None,
) -> Result:
    """:func:`flashtile.attention_kvcache` with ``block_table``, else :func:`flashtile.attention_varlen`. Options are
    those of this module.

    Args:
        q: (T_q, H_q, D). Over caches of 8-bit numbers of 16 bits, or of dtype float8_e4m3fn.
        k: (T_k, H_k, D); with ``block_table`` (pages, page_size, H_k, D), of any page size and any strides with a
            contiguous last dimension; with neither ``block_table`` nor ``cu_seqlens_k`` (B, S_k, H_k, D).
        v: (T_k, H_k, D_v), (pages, page_size, H_k, D_v) or (B, S_k, H_k, D_v).
        cu_seqlens_q: (B + 1), int32: where each sequence of queries begins, and where the last one ends. Rows behind it
            get 0.
        cu_seqlens_k: (B + 1), the same for keys that are in no pages.
        seqused_k: (B), int32: how many keys of each sequence count. Needed with ``block_table``.
        block_table: (B, pages of a sequence), int32: row r of sequence b lies in page block_table[b, r // page_size].
        dropout_p: only without ``block_table``.
        cp_world_size: ranks of a group that have every so many-th key of each sequence. Above 1 only where a query
            sees all keys of a rank: without a window and ALiBi, and causal only with max_seqlen_q = 1. Then it has no
            effect, nor have cp_rank and cp_tot_seqused_k.

    Returns:
        out, (T_q, H_q, D_v); with ``return_softmax_lse`` (out, softmax_lse), with softmax_lse (H_q, T_q), -inf where a
        query sees nothing. :func:`flashtile.combine` merges results over parts of the keys, as vLLM's
        merge_attn_states does.

    Raises:
        ValueError: neither cu_seqlens_k nor seqused_k is given, or both and ``block_table``.
        NotImplementedError: as this module says; or a gradient is asked for, with ``out`` or ``block_table``.
    """
    function = "flash_attn_varlen_func"
    _check_version(function, fa_version)
    refuse_unserved(
        function,
        q_v=q_v,
        output_scale=output_scale,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        dynamic_causal=dynamic_causal,
        gather_kv_indices=gather_kv_indices,
    )
    if cu_seqlens_k is None and seqused_k is None:
        raise ValueError(f"{function}: cu_seqlens_k and seqused_k are None, expected one of them")
    if cu_seqlens_k is not None and block_table is not None:
        raise ValueError(f"{function}: cu_seqlens_k is given, expected None, since block_table is given")
    if cp_world_size > 1:
        _check_parallel(function, cp_world_size, max_seqlen_q, causal, window_size, alibi_slopes)
    return attend_sequences(
        function,
        q,
        k,
        v,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        attention_chunk=0,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        deterministic=deterministic,
        num_splits=num_splits,
        out=out,
        return_lse=flag(function, "return_softmax_lse", return_softmax_lse),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize | list[int] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    fa_version: int = DEFAULT_FA_VERSION,
    s_aux: Tensor | None = None,
) -> Result:
    """:func:`flashtile.compat.flash_attn.flash_attn_with_kvcache` with the options of this module. vLLM had it until
    2025.

    Returns:
        out, (B, S_q, H_q, D_v); with ``return_softmax_lse`` (out, softmax_lse), with softmax_lse (B, H_q, S_q).
    """
    function = "flash_attn_with_kvcache"
    _check_version(function, fa_version)
    return attend_cache(
        function,
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out=out,
        return_lse=flag(function, "return_softmax_lse", return_softmax_lse),
        **splits_of(function, num_splits),
    )


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
    window_size: WindowSize | list[int] = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """:func:`flashtile.compat.flash_attn_interface.get_scheduler_metadata`: a tensor of no element, (0), int32."""
    sizes = (batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim)
    return _get_scheduler_metadata(*sizes, cache_seqlens)


def compile_flash_attn_varlen_func_from_specs(**specs: object) -> None:
    """Does nothing: kernels are compiled before they are installed."""


def _check_version(function: str, fa_version: int) -> None:
    if fa_version not in (2, 3, 4):
        raise ValueError(f"{function}: fa_version is {fa_version}, expected 2, 3 or 4")


def _check_parallel(function, cp_world_size, max_seqlen_q, causal, window_size, alibi_slopes):
    """A rank has every so many-th key. So distances between queries and keys are not those of rows."""
    single = isinstance(max_seqlen_q, int) and max_seqlen_q == 1
    if (causal and not single) or window_of(function, window_size) is not None or alibi_slopes is not None:
        expected = "1, or max_seqlen_q = 1 or causal=False, with neither window_size nor alibi_slopes"
        refuse(function, "cp_world_size", cp_world_size, expected)
