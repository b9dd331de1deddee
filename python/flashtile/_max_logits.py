"""The largest score of each head beside the results of a call, and by a call of its own."""

import torch
from torch import Tensor

from . import _C
from ._arguments import as_number
from ._autograd import attend, is_traced
from ._core import entries_of, is_compiling, refuse_flag, takes_operators
from ._fp8 import E4M3
from ._invariance import is_batch_invariant
from ._ops import kvcache_operator
from ._options import BATCH_INVARIANT, MAX_LOGITS, RETURN_LSE, SCALE, SCORES, SEQUENCES, replaced

# Scores are multiplied with this. A power of two rounds none of them, and this one leaves room below and above.
_SHARPNESS = 2.0**64
# What is below can be multiplied: a scale stays within float32, and a softcap below those that count as none.
_LARGEST_SCALE, _LARGEST_SOFTCAP = 2.0**60, 2.0**58


def attend_with_max_logits(function, q, k, v, options, return_lse, return_max_logits, out):
    """What `attend` returns, and behind it the largest score of each head."""
    if return_max_logits is not True:
        refuse_flag(function, "return_max_logits", return_max_logits)
    if getattr(q, "dtype", None) is E4M3:
        raise NotImplementedError(
            f"{function}: return_max_logits is True, expected False with q of {E4M3}; nearest supported: attention in "
            "16 bits of what flashtile.fp8.dequantize returns"
        )
    if is_traced() or takes_operators(q, k, v) or keeps_bits(q, options[BATCH_INVARIANT]):
        require_room(function, options)  # before anything is written
        found = attend(function, q, k, v, options, return_lse, out)
        largest = largest_scores(function, q, k, v, options[: len(SCORES)], options[SEQUENCES])
    else:
        sequences = options[SEQUENCES]
        largest = new_max_logits(q, None if sequences is None else sequences[0])
        found = attend(function, q, k, v, replaced(options, MAX_LOGITS, largest), return_lse, out)
    return (*found, largest) if return_lse else (found, largest)


def keeps_bits(q, batch_invariant):
    """Whether results must have the bits that they have in other calls: Hopper's kernels that find the largest scores,
    too, are others."""
    is_invariant = is_batch_invariant() if batch_invariant is None else batch_invariant is True
    return is_invariant and not getattr(q, "is_cpu", True)


def new_max_logits(q, cu_seqlens_q):
    """Memory for the largest score of each head; None where the module will refuse q."""
    if not isinstance(q, Tensor) or q.is_nested or q.layout is not torch.strided or q.dim() < 3:
        return None
    return q.new_empty((entries_of(q, cu_seqlens_q), q.shape[-2]), dtype=torch.float32)


# ---- by a call of its own: the lse of scores that are 2^64 times as large has nothing but the largest one in it


@torch.no_grad()
def largest_scores(function, q, k, v, scores, sequences):
    """The largest score of each head, of the options `scores`. Values may be any: lse is all that counts."""
    options = (*sharpened(scores, q), 0.0, None, None, False, sequences, None, None)
    values = v[..., :8] if v.dim() > 0 else v  # the module says what is wrong with those
    _, lse = attend(function, q, k, values, options, True)
    return largest_of(lse, None if sequences is None else sequences[0])


@torch.no_grad()
def largest_scores_over_cache(k_cache, v_cache, operands, tables, options):
    """The same of a call over a cache, to which it has appended its new rows before."""
    q, k_new, _, rotary_cos, rotary_sin = operands
    held, block_table, cache_batch_idx, leftpad, cu_seqlens_q, k_descale, _ = tables
    if k_new is not None:
        added = k_new.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff()
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        held = (held + added).clamp(max=capacity)
    tables = (held, block_table, cache_batch_idx, leftpad, cu_seqlens_q, k_descale, k_descale)
    scores, (rotary_interleaved, num_splits) = options[: len(SCORES)], options[len(SCORES) : RETURN_LSE - 1]
    options = (*sharpened(scores, q), rotary_interleaved, num_splits, False, True, None)
    _, lse = kvcache_operator(k_cache, v_cache, (q, None, None, rotary_cos, rotary_sin), tables, options)
    return largest_of(lse, cu_seqlens_q)


def require_room(function, options):
    """Refuses a scale and a softcap that cannot be multiplied, if their values are known. What is no number is left to
    the module."""
    if is_compiling():
        return
    scale, softcap = map(as_number, options[SCALE : len(SCORES)])
    if isinstance(scale, int | float) and not abs(scale) < _LARGEST_SCALE:
        _refuse_number(function, "scale", scale, "a number of a size below 2^60")
    if isinstance(softcap, int | float) and not 0 <= softcap < _LARGEST_SOFTCAP:
        _refuse_number(function, "softcap", softcap, "a number of at least 0 and below 2^58")


def _refuse_number(function, name, number, expected):
    raise ValueError(
        f"{function}: {name} is {_C.described(number)}, expected {expected}, as the largest score is that of scores "
        "times 2^64 here"
    )


def sharpened(scores, q):
    """The options `scores`, of scores that are so many times as large, without a sink."""
    slopes, _, mask, causal, window, scale, softcap = scores
    if isinstance(slopes, Tensor) and slopes.dtype == torch.float32:
        slopes = slopes * _SHARPNESS  # else the module refuses them
    scale = (max((*q.shape[-1:], 1)) ** -0.5 if scale is None else scale) * _SHARPNESS
    return slopes, None, mask, causal, window, scale, softcap * _SHARPNESS


def largest_of(lse, cu_seqlens_q):
    """The largest score of each head, (B, H_q), of the lse of sharpened scores, (B, H_q, S_q) or ragged (H_q, T_q)."""
    *batch, heads, rows = lse.shape
    if cu_seqlens_q is not None:
        # Rows behind the last sequence count as one more.
        sequence = torch.bucketize(torch.arange(rows, device=lse.device), cu_seqlens_q[1:], right=True)
        largest = lse.new_full((len(cu_seqlens_q), heads), -torch.inf)
        largest = largest.scatter_reduce(0, sequence[:, None].expand(rows, heads), lse.T, "amax")[:-1]
    else:
        largest = lse.amax(dim=-1) if rows > 0 else lse.new_full((*batch, heads), -torch.inf)
    return largest / _SHARPNESS
