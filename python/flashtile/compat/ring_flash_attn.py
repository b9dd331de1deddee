"""``ring_flash_attn``: its functions, with its parameters, computed by :mod:`flashtile.distributed`.

Each rank of a process group has as many rows of a sequence as the others, calls the function with its own, and gets
the results of these: those of the whole sequence. Which rows they are depends on the function, for R ranks:

- ring_flash_attn_func: rank r has chunk r of R.
- zigzag_ring_flash_attn_func: chunk r and, behind it, chunk 2R - 1 - r of 2R.
- ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_func: of each of several sequences the rows that it would
  have if there were no other. cu_seqlens says where the caller's parts begin.
- llama3_flash_attn_varlen_func: chunk r of R of all tokens, wherever sequences begin in it;
  llama3_flash_attn_prepare_cu_seqlens makes its tables.

What they share:

- dropout_p: above 0 on all ranks or on none. The seed comes from PyTorch's CPU generator, from which every rank draws;
  that of the group's first rank counts (of the llama3 functions each rank's own). Where keys travel from rank to rank,
  chunks must begin at multiples of 16 rows of their sequence; :func:`flashtile.distributed.attention` says when others
  are served.
- softmax_scale: by default 1/√D.
- causal, window_size, alibi_slopes: of the whole sequence, as in :mod:`flashtile.compat.flash_attn`; slopes are the
  same on all ranks.
- deterministic: gradients are the same bits in every run. False leaves that to
  torch.are_deterministic_algorithms_enabled().
- return_attn_probs: return (out, softmax_lse, None). softmax_lse is float32, the natural logarithm, differentiable.
- group: a process group of torch.distributed, by default the default group; with gloo ranks may be on CPUs. Without
  any, the caller has all rows.

How rows meet the keys of other ranks is what :func:`flashtile.distributed.explain` says, whatever the function is
called: round a ring, gathered, or by an exchange of heads.

There is no stripe_flash_attn_func, where rank r has rows r, r + R and so on: the kernels take rows that stand together,
and of such a sequence none do. Nearest supported: zigzag_ring_flash_attn_func, which balances a causal mask as well.
Nor are there the adapters for transformers.

>>> import torch
>>> from flashtile.compat.ring_flash_attn import zigzag_ring_flash_attn_func
>>> q = torch.randn(1, 64, 8, 32)  # the caller's rows; here there is one rank, and these are all
>>> k, v = torch.randn(2, 1, 64, 2, 32)
>>> zigzag_ring_flash_attn_func(q, k, v, causal=True).shape
torch.Size([1, 64, 8, 32])
"""

import bisect
import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..distributed import Layout, attention, attention_varlen
from ..distributed.attention import group_size
from ..varlen import attention_varlen as local_attention_varlen
from ._common import (
    WindowSize,
    attend,
    described,
    flag,
    integer,
    new_seed,
    require_rank,
    require_table,
    unpacked,
    window_of,
)
from ._gathered import attend_gathered

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

# The release whose functions these are; the local label says whose code it is.
__version__ = "0.1.8+flashtile"

Result = Tensor | tuple[Tensor, Tensor, None]


def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Attention of a sequence whose chunk r is rank r's. Options are those of this module.

    Args:
        q: (B, S_local, H_q, D), the caller's chunk. S_local is the same on all ranks.
        k: (B, S_local, H_k, D). H_q is a multiple of H_k.
        v: (B, S_local, H_k, D_v).

    Returns:
        out, (B, S_local, H_q, D_v), of the caller's rows; or (out, softmax_lse, None), with softmax_lse (B, H_q,
        S_local).
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return _ring("ring_flash_attn_func", "contiguous", q, k, v, options)


def ring_flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`ring_flash_attn_func` of q, (B, S_local, H_q, D), and kv, (B, S_local, 2, H_k, D)."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    k, v = unpacked("ring_flash_attn_kvpacked_func", "kv", kv, "(B, S_local, 2, H_k, D)")
    return ring_flash_attn_func(q, k, v, *options)


def ring_flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`ring_flash_attn_func` of qkv, (B, S_local, 3, H, D)."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    q, k, v = unpacked("ring_flash_attn_qkvpacked_func", "qkv", qkv, "(B, S_local, 3, H, D)")
    return ring_flash_attn_func(q, k, v, *options)


def zigzag_ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Attention of a sequence whose chunks r and 2R - 1 - r are rank r's: under a causal mask all have the same work.

    Args:
        q: (B, S_local, H_q, D), both chunks, one behind the other. S_local is even, the same on all ranks.
        k: (B, S_local, H_k, D). H_q is a multiple of H_k.
        v: (B, S_local, H_k, D_v).

    Returns:
        out, (B, S_local, H_q, D_v), of the caller's rows; or (out, softmax_lse, None), with softmax_lse (B, H_q,
        S_local).
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return _ring("zigzag_ring_flash_attn_func", "zigzag", q, k, v, options)


def zigzag_ring_flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`zigzag_ring_flash_attn_func` of q, (B, S_local, H_q, D), and kv, (B, S_local, 2, H_k, D)."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    k, v = unpacked("zigzag_ring_flash_attn_kvpacked_func", "kv", kv, "(B, S_local, 2, H_k, D)")
    return zigzag_ring_flash_attn_func(q, k, v, *options)


def zigzag_ring_flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`zigzag_ring_flash_attn_func` of qkv, (B, S_local, 3, H, D)."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    q, k, v = unpacked("zigzag_ring_flash_attn_qkvpacked_func", "qkv", qkv, "(B, S_local, 3, H, D)")
    return zigzag_ring_flash_attn_func(q, k, v, *options)


def ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Attention of several sequences, chunk r of each of which is rank r's.

    Args:
        q: (T_local, H_q, D), the caller's rows, sequence by sequence.
        k: (T_local, H_k, D). H_q is a multiple of H_k.
        v: (T_local, H_k, D_v).
        cu_seqlens: (B + 1), int32, the same on all ranks: where the caller's part of each sequence begins, and where
            the last one ends. The host reads it, and waits for a GPU that has it.
        max_seqlen: nothing depends on it.

    Returns:
        out, (T_local, H_q, D_v), of the caller's rows; or (out, softmax_lse, None), with softmax_lse (H_q, T_local).
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return _ring_varlen("ring_flash_attn_varlen_func", 1, q, k, v, cu_seqlens, options)


def ring_flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`ring_flash_attn_varlen_func` of q, (T_local, H_q, D), and kv, (T_local, 2, H_k, D)."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    k, v = unpacked("ring_flash_attn_varlen_kvpacked_func", "kv", kv, "(T_local, 2, H_k, D)")
    return ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, *options)


def ring_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`ring_flash_attn_varlen_func` of qkv, (T_local, 3, H, D)."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    q, k, v = unpacked("ring_flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(T_local, 3, H, D)")
    return ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, *options)


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Attention of several sequences, chunks r and 2R - 1 - r of each of which are rank r's.

    Args:
        q: (T_local, H_q, D), the caller's rows, sequence by sequence.
        k: (T_local, H_k, D). H_q is a multiple of H_k.
        v: (T_local, H_k, D_v).
        cu_seqlens: (B + 1), int32, the same on all ranks: where the caller's part of each sequence begins, and where
            the last one ends, of even lengths. The host reads it, and waits for a GPU that has it.
        max_seqlen: nothing depends on it.

    Returns:
        out, (T_local, H_q, D_v), of the caller's rows; or (out, softmax_lse, None), with softmax_lse (H_q, T_local).
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return _ring_varlen("zigzag_ring_flash_attn_varlen_func", 2, q, k, v, cu_seqlens, options)


def zigzag_ring_flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`zigzag_ring_flash_attn_varlen_func` of q, (T_local, H_q, D), and kv, (T_local, 2, H_k, D)."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    k, v = unpacked("zigzag_ring_flash_attn_varlen_kvpacked_func", "kv", kv, "(T_local, 2, H_k, D)")
    return zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, *options)


def zigzag_ring_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """:func:`zigzag_ring_flash_attn_varlen_func` of qkv, (T_local, 3, H, D)."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    q, k, v = unpacked("zigzag_ring_flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(T_local, 3, H, D)")
    return zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, *options)


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
        q: (T_local, H_q, D), the caller's tokens. T_local is the same on all ranks, which is not checked.
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
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    sequences = (cu_seqlens_q, cu_seqlens_k, local_k_slice)
    return _llama3("llama3_flash_attn_varlen_func", q, k, v, *sequences, options)


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
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    k, v = unpacked("llama3_flash_attn_varlen_kvpacked_func", "kv", kv, "(T_local, 2, H_k, D)")
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice)
    return llama3_flash_attn_varlen_func(q, k, v, *sequences, *options)


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
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    q, k, v = unpacked("llama3_flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(T_local, 3, H, D)")
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice)
    return llama3_flash_attn_varlen_func(q, k, v, *sequences, *options)


class _Options(NamedTuple):
    """What all functions take, in their order."""

    dropout_p: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    alibi_slopes: Any
    deterministic: Any
    return_attn_probs: Any
    group: Any


def _ring(function, layout, q, k, v, options):
    require_rank(function, 4, "(B, S_local, H, D)", q=q, k=k, v=v)
    group = options.group
    if layout == "zigzag" and group_size(group) > 1:
        for name, x in (("q", q), ("k", k)):
            if x.shape[1] % 2 != 0:
                raise ValueError(f"{function}: {name} has {x.shape[1]} rows, expected an even number: two chunks")
    seed = _common_seed(options.dropout_p, q, group)
    return _attend(function, attention, q, k, v, options, seed=seed, group=group, layout=layout)


def _ring_varlen(function, chunks, q, k, v, cu_seqlens, options):
    """`chunks` is how many a rank has of each sequence."""
    require_rank(function, 3, "(T_local, H, D)", q=q, k=k, v=v)
    require_table(function, "(B + 1)", cu_seqlens=cu_seqlens)
    group = options.group
    if group_size(group) == 1:
        tables = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        return _attend(function, local_attention_varlen, q, k, v, options, **tables)
    layout, begins = _divided(function, tuple(cu_seqlens.tolist()), len(q), group_size(group), chunks)
    seed = _common_seed(options.dropout_p, q, group)
    more = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, seed=seed, group=group, layout=layout)
    return _attend(function, attention_varlen, q, k, v, options, **more)


def _llama3(function, q, k, v, cu_seqlens_q, cu_seqlens_k, local_k_slice, options):
    require_rank(function, 3, "(T_local, H, D)", q=q, k=k, v=v)
    require_table(function, "(B + 1)", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if not isinstance(local_k_slice, slice) or local_k_slice.step not in (None, 1):
        raise TypeError(f"{function}: local_k_slice is {described(local_k_slice)}, expected slice(begin, end)")
    group, ranks = options.group, group_size(options.group)
    begin, end, _ = local_k_slice.indices(ranks * len(k))
    tables = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if ranks == 1:
        return _attend(function, local_attention_varlen, q, k[begin:end], v[begin:end], options, **tables)
    if not options.causal:
        window = window_of(function, options.window_size)
        for name, x in (("window_size", window), ("alibi_slopes", options.alibi_slopes)):
            if x is not None:
                expected = "none where causal is False; nearest supported: causal=True, or ring_flash_attn_varlen_func"
                raise NotImplementedError(f"{function}: {name} is {described(x)}, expected {expected}")
    seed = new_seed(options.dropout_p)
    if seed is not None:  # another one for each rank, as all count their rows from 0
        seed = (int(seed) + dist.get_rank(group)) % 2**63
    more = dict(seed=seed, group=group, keys=(begin, max(begin, end)))
    return _attend(function, attend_gathered, q, k, v, options, **tables, **more)


def _attend(function, attention, q, k, v, options, **more):
    return_lse = flag(function, "return_attn_probs", options.return_attn_probs)
    result = attend(
        function,
        attention,
        q,
        k,
        v,
        softmax_scale=options.softmax_scale,
        window_size=options.window_size,
        softcap=0.0,
        deterministic=options.deterministic,
        causal=options.causal,
        alibi_slopes=options.alibi_slopes,
        dropout_p=options.dropout_p,
        return_lse=return_lse,
        **more,
    )
    return (*result, None) if return_lse else result


@lru_cache(maxsize=64)  # all layers of a model ask the same
def _divided(function, begins, rows, ranks, chunks):
    """The layout of sequences of which each rank has as many chunks, and where they begin among all rows. The caller's
    parts begin at `begins`; what it has behind the last, of `rows`, is a sequence of no document."""
    each = list(itertools.pairwise((*begins, rows)))
    if begins[0] != 0 or any(begin > end for begin, end in each):
        expected = f"0 and numbers that never decrease, up to the {rows} rows of q"
        raise ValueError(f"{function}: cu_seqlens is {described(begins)}, expected {expected}")
    if any((end - begin) % chunks for begin, end in each[:-1]):
        raise ValueError(f"{function}: cu_seqlens is {described(begins)}, expected even numbers: two chunks of each")
    runs = [[] for _ in range(ranks)]
    for begin, end in each:
        of_each = chunks if end <= begins[-1] else 1
        size = (end - begin) // of_each
        for rank, own in enumerate(runs):
            for chunk in (rank, 2 * ranks - 1 - rank)[:of_each]:
                own.append((ranks * begin + chunk * size, ranks * begin + (chunk + 1) * size))
    return Layout(tuple(map(tuple, runs))), tuple(ranks * begin for begin in begins)


def _common_seed(dropout_p, like, group):
    """A seed where weights are dropped: the first rank's, but all draw, so that generators stay alike."""
    seed = new_seed(dropout_p)
    if seed is None or group_size(group) == 1:
        return seed
    seed = seed if dist.get_backend(group) == "gloo" else seed.to(like.device)
    dist.broadcast(seed, 0 if group is None else dist.get_process_group_ranks(group)[0], group=group)
    return int(seed)


def _longest(cu_seqlens):
    return int(cu_seqlens.diff().amax()) if len(cu_seqlens) > 1 else 0
