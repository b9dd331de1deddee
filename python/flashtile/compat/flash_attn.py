"""``flash_attn`` 2: its public functions, with its parameters, computed by flashtile.

What the functions share, in addition to the rules of :func:`flashtile.attention`, which computes the same formula:

- dropout_p: where it is above 0, the seed comes from PyTorch's CPU generator, so torch.manual_seed repeats it.
- softmax_scale: by default 1/√D.
- causal: masks are aligned at the bottom right, the last query with the last key.
- window_size: (left, right), or a list, array or tensor of two integers: inclusive distances from the diagonal, in
  tokens; a negative one is unbounded.
- softcap: bound of the scaled scores; 0 or less: none.
- alibi_slopes: float32, (H_q) or (B, H_q). Get no gradient.
- deterministic: gradients are the same bits in every run. False leaves that to
  torch.are_deterministic_algorithms_enabled().
- return_attn_probs: return (out, softmax_lse, S_dmask). softmax_lse is float32, the natural logarithm, differentiable;
  where a row sees nothing it is -inf. S_dmask, with dropout, is (B, H_q, S_q, S_k), both lengths (of a ragged batch the
  longest ones) rounded up to multiples of 128: the weights before dropout, of q's dtype, negative where one is dropped.
  For it attention is computed 2 · S_k / 256 times more. It has no element, shape (0), without dropout, as flash-attn's,
  and where it would have more than 2^27.
- D and D_v may differ, and need not be multiples of 8 (then operands are copied); both are at most 256. A last
  dimension that is not contiguous is copied.

float16 and bfloat16; on the CPU also float32. Messages about shapes, dtypes and values name the function of flashtile
that found them.

>>> import torch
>>> from flashtile.compat.flash_attn import flash_attn_func
>>> q = torch.randn(2, 100, 8, 64)
>>> k, v = torch.randn(2, 2, 120, 2, 64)
>>> flash_attn_func(q, k, v, causal=True, window_size=(64, -1)).shape
torch.Size([2, 100, 8, 64])
"""

import sys

from torch import Tensor

from ..attention import attention
from ..varlen import attention_varlen
from . import bert_padding, layers
from ._cache import attend_cache
from ._common import WindowSize, attend, flag, unpacked
from ._passes_2 import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    forward,
    varlen_forward,
)

# The release whose functions these are, for callers that compare versions; the local label says whose code it is.
__version__ = "2.8.3+flashtile"

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "layers",
]

flash_attn_interface = sys.modules[__name__]  # the package has its functions in a module of this name

# Under these names the package has the same passes as operators of PyTorch.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flashtile.attention`. Options are those of this module.

    Args:
        q: (B, S_q, H_q, D).
        k: (B, S_k, H_k, D). H_q is a multiple of H_k.
        v: (B, S_k, H_k, D_v).

    Returns:
        out, (B, S_q, H_q, D_v); or (out, softmax_lse, S_dmask), with softmax_lse (B, H_q, S_q).
    """
    options = dict(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    function = "flash_attn_func"
    if not flag(function, "return_attn_probs", return_attn_probs):
        return attend(function, attention, q, k, v, **options)
    return forward(function, q, k, v, return_softmax=True, **options)[:3]


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of q, (B, S_q, H_q, D), and kv, (B, S_k, 2, H_k, D)."""
    k, v = unpacked("flash_attn_kvpacked_func", "kv", kv, "(B, S_k, 2, H_k, D)")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of qkv, (B, S, 3, H, D)."""
    q, k, v = unpacked("flash_attn_qkvpacked_func", "qkv", qkv, "(B, S, 3, H, D)")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """:func:`flashtile.attention_varlen`; with ``block_table`` :func:`flashtile.attention_kvcache`. Options are those
    of this module.

    Args:
        q: (T_q, H_q, D).
        k: (T_k, H_k, D); with ``block_table`` (pages, page_size, H_k, D), of any page size from 1 on.
        v: (T_k, H_k, D_v); with ``block_table`` (pages, page_size, H_k, D_v).
        cu_seqlens_q: (B + 1), int32, on q's device: where each sequence begins, and where the last one ends.
        cu_seqlens_k: (B + 1), the same for keys and values; with ``block_table`` only the lengths count.
        max_seqlen_q: nothing depends on it, nor on max_seqlen_k.
        block_table: (B, pages of a sequence), int32: row r of sequence b lies in page block_table[b, r // page_size].

    Returns:
        out, (T_q, H_q, D_v); or (out, softmax_lse, S_dmask), with softmax_lse (H_q, T_q).

    Raises:
        NotImplementedError: dropout with ``block_table``; or a gradient is asked for, which there is none of with
            ``block_table``.
    """
    function = "flash_attn_varlen_func"
    sequences = dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    options = dict(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return_attn_probs = flag(function, "return_attn_probs", return_attn_probs)
    if block_table is None and not return_attn_probs:
        return attend(function, attention_varlen, q, k, v, **sequences, **options)
    options |= dict(block_table=block_table, return_softmax=return_attn_probs)
    out, softmax_lse, s_dmask, _ = varlen_forward(function, q, k, v, **sequences, **options)
    return (out, softmax_lse, s_dmask) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of q, (T_q, H_q, D), and kv, (T_k, 2, H_k, D)."""
    k, v = unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, "(T_k, 2, H_k, D)")
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *sequences, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of qkv, (T, 3, H, D)."""
    q, k, v = unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(T, 3, H, D)")
    sequences = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *sequences, *options)


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
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flashtile.attention_kvcache`. Options are those of this module. There is no backward, though inputs may
    require a gradient.

    Args:
        q: (B, S_q, H_q, D). If D or D_v is no multiple of 8, caches are copied, and back where k is given.
        k_cache: (B_cache, S_cache, H_k, D); with ``block_table`` (pages, page_size, H_k, D), of any page size.
        v_cache: (B_cache, S_cache, H_k, D_v), or (pages, page_size, H_k, D_v).
        k: (B, S_new, H_k, D): written into the cache behind the rows that it holds, in place.
        v: (B, S_new, H_k, D_v): their values. Given if and only if k is.
        rotary_cos: (positions, R / 2): the first R elements of q and k are rotated. Needs k. The position of row i of k
            is the number of rows held plus i, and so is that of row i of q, but with neither causal=True nor a
            window_size all rows of q have that of the first one.
        rotary_sin: (positions, R / 2).
        cache_seqlens: (B), int32, or an int: how many rows the cache holds. By default it is full; needed where k is
            given.
        cache_batch_idx: (B), int32: the entry of the cache that each sequence has, or its row of block_table.
        cache_leftpad: (B), int32: rows at the beginning of each sequence that do not count.
        block_table: (B, pages of a sequence), int32; with cache_batch_idx any number of rows.
        rotary_interleaved: rotate elements (2i, 2i + 1); False: (i, i + R / 2).
        num_splits: parts that keys are divided into on a GPU; 0: as many as fill it. Changes last bits at most.

    Returns:
        out, (B, S_q, H_q, D_v); with ``return_softmax_lse`` (out, softmax_lse), with softmax_lse (B, H_q, S_q).

    Raises:
        ValueError: k without cache_seqlens, rotary_cos without k, or on the CPU a position that rotary_cos lacks.
        NotImplementedError: a gradient is asked for; when traced by torch.compile, an input that requires one.
    """
    function = "flash_attn_with_kvcache"
    return attend_cache(
        function,
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        rotary_cos=rotary_cos,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=flag(function, "return_softmax_lse", return_softmax_lse),
    )
