"""Forwards of FlashAttention-3."""

from ..attention import attention
from ..varlen import attention_varlen
from ._chunks import length_of
from ._common import attend, flag
from ._ragged import attend_ragged


def forward(function, q, k, v, *, attention_chunk, return_attn_probs, tables=None, **options):
    """Out, or (out, softmax_lse), of keys that are in no cache. `tables` are the arguments of `attend_ragged`."""
    options["return_lse"] = flag(function, "return_attn_probs", return_attn_probs)
    chunk = length_of(function, attention_chunk)
    if chunk == 0 and tables is None:
        return attend(function, attention, q, k, v, **options)
    options |= tables or {}
    if chunk == 0 and options["cu_seqlens_q"] is not None and options["cu_seqlens_k"] is not None:
        return attend(function, attention_varlen, q, k, v, **options)
    return attend_ragged(function, q, k, v, attention_chunk=chunk, **options)


def nothing_kept(lse):
    """(out_accum, softmax_lse_accum), as they are where keys are not divided."""
    return lse.new_empty(0), lse.new_empty(0)
