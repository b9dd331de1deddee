"""The passes of ``flash_attn`` 2 by themselves, which its package has under names with an underscore.

ring-flash-attn, yunchang and diffusers call them. Arguments are those of :mod:`flashtile.compat.flash_attn`, with the
two sides of a window one by one.

- A forward returns (out, softmax_lse, S_dmask, rng_state). rng_state, (2) int64, holds the seed of dropout; it is on
  the CPU, so that backward need not wait for a GPU.
- A backward writes into dq, dk and dv, each a tensor or None. It returns softmax_d, Σ dout · out of each row, float32,
  of softmax_lse's shape, without the rows of padding that flash-attn's has. Where weights were dropped it needs the
  forward's rng_state.
"""

import torch
from torch import Tensor

from .._core import require_shape_and_dtype
from .._padding import require_values
from ..attention import attention
from ..varlen import attention_varlen
from ._cache import attend_cache
from ._common import attend, described, drops, flag, new_seed, refuse, require_rank, require_table, require_tensors
from ._dmask import signed_weights
from ._passes import run_backward
from ._ragged import check_lengths, equal_lengths, those_first

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(function, q, k, v, *, dropout_p, return_softmax, **options):
    """(out, softmax_lse, S_dmask, seed) of a dense batch. Options are those of `attend`."""
    return_softmax, seed = flag(function, "return_softmax", return_softmax), new_seed(dropout_p)
    out, lse = attend(function, attention, q, k, v, dropout_p=dropout_p, seed=seed, return_lse=True, **options)
    if seed is None or not return_softmax:
        return out, lse, q.new_empty(0), seed
    longest = (q.shape[1], k.shape[1])
    options |= dict(cu_seqlens_q=equal_lengths(q), cu_seqlens_k=equal_lengths(k))
    s_dmask = signed_weights(function, q.flatten(0, 1), k.flatten(0, 1), *longest, dropout_p, seed, **options)
    return out, lse, s_dmask, seed


def varlen_forward(
    function,
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    dropout_p,
    return_softmax,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    num_splits=0,
    **options,
):
    """(out, softmax_lse, S_dmask, seed) of a ragged batch, or of one whose keys lie in pages."""
    longest = (max_seqlen_q, max_seqlen_k)
    return_softmax = flag(function, "return_softmax", return_softmax)
    if block_table is not None:
        if drops(dropout_p):
            refuse(function, "dropout_p", described(dropout_p), "0.0, since block_table is given")
        if seqused_k is None:
            require_table(function, "(B + 1)", cu_seqlens_k=cu_seqlens_k)
            seqused_k = cu_seqlens_k.diff()
        options |= dict(block_table=block_table, leftpad=leftpad_k, num_splits=num_splits, cu_seqlens_q=cu_seqlens_q)
        del options["deterministic"]  # there is no backward
        out, lse = attend_cache(function, q, k, v, cache_seqlens=seqused_k, return_lse=True, **options)
        return out, lse, q.new_empty(0), None
    if leftpad_k is not None:
        require_rank(function, 3, "(T_k, H_k, D)", k=k)
        require_rank(function, 3, "(T_k, H_k, D_v)", v=v)
        require_values(function, k, v)
        tables = dict(leftpad_k=leftpad_k) if seqused_k is None else dict(seqused_k=seqused_k, leftpad_k=leftpad_k)
        require_table(function, "(B + 1)", cu_seqlens_k=cu_seqlens_k)
        require_table(function, "(B)", cu_seqlens_k.shape[0] - 1, **tables)
        check_lengths(function, k.shape[0], "T_k", cu_seqlens_k=cu_seqlens_k, **tables)
        used = None if seqused_k is None else seqused_k - leftpad_k
        order, cu_seqlens_k = those_first(k.shape[0], cu_seqlens_k, leftpad_k, used)
        k, v, seqused_k = k[order], v[order], None
    options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
    seed = new_seed(dropout_p)
    dropout = dict(dropout_p=dropout_p, seed=seed, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    out, lse = attend(function, attention_varlen, q, k, v, return_lse=True, **dropout, **options)
    if seed is None or not return_softmax:
        return out, lse, q.new_empty(0), seed
    return out, lse, signed_weights(function, q, k, *longest, dropout_p, seed, **options), seed


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """The forward pass of a dense batch. Autograd sees it too, if an input requires a gradient."""
    *results, seed = forward(
        "_flash_attn_forward",
        q,
        k,
        v,
        dropout_p=dropout_p,
        return_softmax=return_softmax,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=False,
    )
    return *results, _state_of(seed)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """The forward pass of a ragged batch. zero_tensors has no effect."""
    *results, seed = varlen_forward(
        "_flash_attn_varlen_forward",
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=dropout_p,
        return_softmax=return_softmax,
        block_table=block_table,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
        num_splits=num_splits,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=False,
    )
    return *results, _state_of(seed)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The backward pass of a dense batch."""
    function = "_flash_attn_backward"
    return run_backward(
        function,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dict(dq=dq, dk=dk, dv=dv),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        dropout_p=dropout_p,
        seed=_seed_of(function, dropout_p, rng_state),
    )


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The backward pass of a ragged batch. zero_tensors has no effect."""
    function = "_flash_attn_varlen_backward"
    return run_backward(
        function,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dict(dq=dq, dk=dk, dv=dv),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        dropout_p=dropout_p,
        seed=_seed_of(function, dropout_p, rng_state),
        sequences=(cu_seqlens_q, cu_seqlens_k, None, None),
    )


def _state_of(seed):
    state = torch.zeros(2, dtype=torch.int64)
    if seed is not None:
        state[0] = seed
    return state


def _seed_of(function, dropout_p, rng_state):
    if not drops(dropout_p):
        return None
    require_tensors(function, rng_state=rng_state)
    require_shape_and_dtype(function, "rng_state", rng_state, (2,), torch.int64)
    return rng_state[0]
