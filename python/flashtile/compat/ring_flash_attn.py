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

Where ranks disagree, or one refuses its arguments, all raise, and the message names the rank.

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

from typing import Any

from torch import Tensor

from ._common import WindowSize
from ._llama3 import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from ._ring import Options, Result, ring, ring_varlen

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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring("ring_flash_attn_func", "contiguous", (q, k, v), options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring("ring_flash_attn_kvpacked_func", "contiguous", (q, kv), options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring("ring_flash_attn_qkvpacked_func", "contiguous", (qkv,), options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring("zigzag_ring_flash_attn_func", "zigzag", (q, k, v), options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring("zigzag_ring_flash_attn_kvpacked_func", "zigzag", (q, kv), options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring("zigzag_ring_flash_attn_qkvpacked_func", "zigzag", (qkv,), options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring_varlen("ring_flash_attn_varlen_func", 1, (q, k, v), cu_seqlens, options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring_varlen("ring_flash_attn_varlen_kvpacked_func", 1, (q, kv), cu_seqlens, options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring_varlen("ring_flash_attn_varlen_qkvpacked_func", 1, (qkv,), cu_seqlens, options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring_varlen("zigzag_ring_flash_attn_varlen_func", 2, (q, k, v), cu_seqlens, options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring_varlen("zigzag_ring_flash_attn_varlen_kvpacked_func", 2, (q, kv), cu_seqlens, options)


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
    options = Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    )
    return ring_varlen("zigzag_ring_flash_attn_varlen_qkvpacked_func", 2, (qkv,), cu_seqlens, options)
