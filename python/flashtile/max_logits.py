"""The largest score of each head."""

from __future__ import annotations

from torch import Tensor

from . import _C
from ._core import is_compiling, require_tensors
from ._max_logits import largest_scores, require_room
from ._options import attention_options
from .attention import Window
from .masks import ColumnMask, ranges_of


def max_logits(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """The largest score of each head, over all pairs of a query and a key that it sees.

    With the scores s of :func:`attention`, scaled, after softcap, with ALiBi::

        max_logits[b, h] = max s[b, h, i, j]        over rows i and columns j that i sees

    Recipes such as QK-Clip scale down the projections of heads in which it exceeds a bound.

    Where out is wanted too, ``return_max_logits`` of :func:`attention`, :func:`attention_varlen` and
    :func:`attention_kvcache` is the better choice: there kernels find it beside their results. This is a call of its
    own, for those who have no values, or want it only now and then: over scores that are 2^64 times as large, whose
    softmax has nothing but the largest one in it. It takes as long as a forward, on a GPU longer, where every block of
    keys moves what such large scores are relative to.

    What a forward returns with ``return_lse`` bounds the largest score of a row at no cost: without sinks it is at most
    lse, and at least lse - log(keys that the row sees). As long as ``lse.amax()`` stays below the bound of a recipe, so
    does every score.

    Args:
        q: (B, S_q, H_q, D), as in :func:`attention`; or ragged, (T_q, H_q, D), with ``cu_seqlens_q``.
        k: (B, S_k, H_k, D), of q's dtype and device; or (T_k, H_k, D).
        cu_seqlens_q: (B + 1), int32, of a ragged batch, as in :func:`attention_varlen`. Given if and only if
            ``cu_seqlens_k`` is.
        cu_seqlens_k: (B + 1), the same for keys.
        seqused_q: (B), int32, of a ragged batch: how many rows of each sequence count; by default all.
        seqused_k: (B), the same for keys.
        causal: hide columns right of the diagonal.
        window: (left, right), inclusive distances from the diagonal, as in :func:`attention`.
        mask: a :class:`flashtile.masks.ColumnMask`, as in :func:`attention` or :func:`attention_varlen`.
        scale: factor of the scores, below 2^60 in size; by default 1/√D.
        softcap: bound of the scores, below 2^58; 0: none. Without ``alibi_slopes``, what scores were before it is had
            by leaving it out.
        alibi_slopes: float32, (H_q) or (B, H_q).

    Returns:
        float32, (B, H_q), -inf where no query of an entry, or of a sequence, sees a key. It carries no gradient. A sink
        is no score of a pair, and dropout changes none, so neither is asked for.

    Raises:
        TypeError, ValueError, NotImplementedError: what :func:`attention` and :func:`attention_varlen` raise, partly in
            their names.

    Example:
        >>> import torch, flashtile
        >>> q, k = torch.randn(2, 100, 8, 64), torch.randn(2, 120, 2, 64)
        >>> largest = flashtile.max_logits(q, k, causal=True)
        >>> largest.shape
        torch.Size([2, 8])
        >>> out, lse = flashtile.attention(q, k, k, causal=True, return_lse=True)
        >>> bool((largest <= lse.amax(dim=-1)).all())
        True

    Sources: QK-Clip, Kimi K2 (2025, arXiv:2507.20534).
    """
    require_tensors("max_logits", q=q, k=k)
    sequences = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    is_ragged = any(x is not None for x in sequences)
    if is_ragged:
        require_tensors("max_logits", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if not is_compiling():  # before they are multiplied
        given = attention_options(causal=causal, window=window, scale=scale, softcap=softcap)
        _C.check_options("max_logits", given)
        require_room("max_logits", given)
    columns = ranges_of("max_logits", mask, q, cu_seqlens_q, ragged=is_ragged)
    scores = (alibi_slopes, None, columns, causal, window, scale, softcap)
    return largest_scores("max_logits", q, k, k, scores, sequences if is_ragged else None)
