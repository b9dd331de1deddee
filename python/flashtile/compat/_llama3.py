"""The llama3 functions of :mod:`flashtile.compat.ring_flash_attn`, which gather keys and values at once."""

import bisect
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..distributed.attention import group_size
from ..varlen import attention_varlen as local_attention_varlen
from ._common import WindowSize, described, integer, new_seed, require_rank, require_table, window_of
from ._gathered import attend_gathered
from ._ring import Options, Result, attend_as_given, refusing_together, unpacked_of


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """The tables of :func:`llama3_flash_attn_varlen_func`, of the sequences that a rank has rows of.

    Args:
        cu_seqlens: (B + 1), int32: where each sequence begins among all tokens, and where the last one ends, at a
            multiple of world_size. The host reads it.
        causal: leave out keys behind the rank's last row.
        rank: the caller's, of world_size ranks.

    Returns:
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice): the sequences of the rank's rows, those
        of the keys that they see, on cu_seqlens' device, the longest of each, and where these keys lie among all.

    >>> import torch
    >>> from flashtile.compat.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens
    >>> cu_seqlens = torch.tensor([0, 6, 16], dtype=torch.int32)
    >>> llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank=1, world_size=2)
    (tensor([0, 8], dtype=torch.int32), tensor([ 0, 10], dtype=torch.int32), 8, 10, slice(6, 16, None))
    """
    function = "llama3_flash_attn_prepare_cu_seqlens"
    require_table(function, "(B + 1)", cu_seqlens=cu_seqlens)
    ranks = integer(function, "world_size", world_size, at_least=1)
    rank = integer(function, "rank", rank, at_least=0)
    if rank >= ranks:
        raise ValueError(f"{function}: rank is {rank}, expected one below world_size = {ranks}")
    begins = cu_seqlens.tolist()
    if begins[-1] % ranks != 0:
        raise ValueError(f"{function}: cu_seqlens ends at {begins[-1]}, expected a multiple of world_size = {ranks}")
    rows = begins[-1] // ranks
    first, end = rank * rows, (rank + 1) * rows
    # Empty sequences are those of the rank whose rows begin there.
    left = bisect.bisect_left(begins, first)
    left -= begins[left] > first
    right = bisect.bisect_left(begins, end)
    some = cu_seqlens[left : right + 1]
    of_q = (some - first).clamp(0, rows)
    of_k = (some.clamp(max=end) if causal else some) - begins[left]
    keys = slice(begins[left], end if causal else begins[right])
    return of_q, of_k, _longest(of_q), _longest(of_k), keys


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Attention of several sequences, one behind the other, whose tokens are divided among ranks in chunks: chunk r of
    R is rank r's. Each gathers the keys and values of all, a second time in backward, and takes those that it needs.

    Args:
        q: (T_local, H_q, D), the caller's tokens. T_local is the same on all ranks.
        k: (T_local, H_k, D). H_q is a multiple of H_k.
        v: (T_local, H_k, D_v).
        cu_seqlens_q: (B + 1), int32, on q's device: where each sequence begins among the caller's tokens, and where the
            last one ends, as :func:`llama3_flash_attn_prepare_cu_seqlens` makes it.
        cu_seqlens_k: (B + 1), the same for the keys in local_k_slice.
        max_seqlen_q: nothing depends on it, nor on max_seqlen_k.
        heads_k_stride: no effect. It bounds memory in ring-flash-attn, which gathers so many KV heads at a time; here
            all heads are gathered at once.
        local_k_slice: which of all ranks' keys the caller's tokens see.

    Returns:
        out, (T_local, H_q, D_v), of the caller's rows; or (out, softmax_lse, None), with softmax_lse (H_q, T_local).

    Raises:
        NotImplementedError: a window_size or alibi_slopes without causal=True, on several ranks: the last key that is
            gathered need not stand where the last query does.
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    sequences = (cu_seqlens_q, cu_seqlens_k, local_k_slice)
    return _llama3("llama3_flash_attn_varlen_func", (q, k, v), *sequences, options)


def llama3_flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`llama3_flash_attn_varlen_func` of q, (T_local, H_q, D), and kv, (T_local, 2, H_k, D)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    sequences = (cu_seqlens_q, cu_seqlens_k, local_k_slice)
    return _llama3("llama3_flash_attn_varlen_kvpacked_func", (q, kv), *sequences, options)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`llama3_flash_attn_varlen_func` of qkv, (T_local, 3, H, D)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    sequences = (cu_seqlens_q, cu_seqlens_k, local_k_slice)
    return _llama3("llama3_flash_attn_varlen_qkvpacked_func", (qkv,), *sequences, options)


def _llama3(function, operands, cu_seqlens_q, cu_seqlens_k, local_k_slice, options):
    """`operands` are q, k and v, or q and kv, or qkv."""
    with refusing_together(function, operands, options, _own_seed) as seeded:
        q, k, v = unpacked_of(function, "T_local", operands)
        require_rank(function, 3, "(T_local, H, D)", q=q, k=k, v=v)
        require_table(function, "(B + 1)", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        if not isinstance(local_k_slice, slice) or local_k_slice.step not in (None, 1):
            raise TypeError(f"{function}: local_k_slice is {described(local_k_slice)}, expected slice(begin, end)")
        ranks = group_size(options.group)
        begin, end, _ = local_k_slice.indices(ranks * len(k))
        tables = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        if ranks == 1:
            return attend_as_given(function, local_attention_varlen, q, k[begin:end], v[begin:end], options, **tables)
        if not options.causal:
            window = window_of(function, options.window_size)
            for name, x in (("window_size", window), ("alibi_slopes", options.alibi_slopes)):
                if x is not None:
                    expected = (
                        "none where causal is False; nearest supported: causal=True, or ring_flash_attn_varlen_func"
                    )
                    raise NotImplementedError(f"{function}: {name} is {described(x)}, expected {expected}")
        more = dict(group=options.group, keys=(begin, max(begin, end)))
        return attend_as_given(function, seeded(attend_gathered), q, k, v, options, **tables, **more)


def _own_seed(dropout_p, device, group):
    """A seed where weights are dropped: another one for each rank, as all count their rows from 0."""
    seed = new_seed(dropout_p)
    return None if seed is None else (int(seed) + dist.get_rank(group)) % 2**63


def _longest(cu_seqlens):
    return int(cu_seqlens.diff().amax()) if len(cu_seqlens) > 1 else 0
