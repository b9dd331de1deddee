"""Forwards of ``flash_attn`` 2."""

from ..attention import attention
from ..varlen import attention_varlen
from ._cache import attend_cache
from ._common import attend, described, drops, flag, new_seed, refuse, refuse_unserved, require_table
from ._dmask import signed_weights
from ._ragged import equal_lengths


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
    refuse_unserved(function, leftpad_k=leftpad_k)
    options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
    seed = new_seed(dropout_p)
    dropout = dict(dropout_p=dropout_p, seed=seed, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    out, lse = attend(function, attention_varlen, q, k, v, return_lse=True, **dropout, **options)
    if seed is None or not return_softmax:
        return out, lse, q.new_empty(0), seed
    return out, lse, signed_weights(function, q, k, *longest, dropout_p, seed, **options), seed
