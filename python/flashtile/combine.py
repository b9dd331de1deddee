"""Attention over keys in parts, put together."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def combine(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the results over N parts of them that share none.

    Each part is what :func:`attention` and its kin return with ``return_lse=True``, of the same queries::

        lse = log(Σ_n exp(lses[n]))
        out = Σ_n exp(lses[n] - lse) · outs[n]

    Args:
        outs: (N, B, S_q, H_q, D_v), or ragged (N, T_q, H_q, D_v), of any floating dtype; or a sequence of N tensors.
        lses: (N, B, H_q, S_q), or (N, H_q, T_q), natural logarithms; or a sequence of N tensors. Where a part's is
            -inf, it saw nothing, and what its out holds there does not count.

    Returns:
        (out, lse), of a part's shapes: out of the dtype of ``outs``, lse float32. All is computed in float32 (in
        float64 where lses are), by operations of PyTorch: both results are differentiable with respect to outs and
        lses. A row that saw nothing in any part has out = 0, lse = -inf and gradients 0.

    Masks, and ALiBi, go by the distance from the diagonal, which lies elsewhere in each part: they are the caller's to
    shift. Sinks belong to one part alone.

    Raises:
        TypeError: an argument holds something else than floating tensors.
        ValueError: shapes break the rules above.

    Example:
        >>> import torch, flashtile
        >>> q = torch.randn(1, 64, 4, 64)
        >>> k, v = torch.randn(2, 1, 1000, 4, 64)
        >>> parts = [slice(0, 400), slice(400, 1000)]
        >>> results = [flashtile.attention(q, k[:, part], v[:, part], return_lse=True) for part in parts]
        >>> out, lse = flashtile.combine(*zip(*results))
        >>> torch.allclose(out, flashtile.attention(q, k, v), atol=1e-5)
        True

    Sources: the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), over parts as in Flash-Decoding (Dao
    et al. 2023).
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    if outs.dim() not in (4, 5) or len(outs) == 0:
        _refuse_shape("outs", outs, "(N, B, S_q, H_q, D_v) or (N, T_q, H_q, D_v) with N of at least 1")
    parts, *batch, rows, heads, _ = outs.shape
    if lses.shape != (parts, *batch, heads, rows):
        sizes = "(N, B, H_q, S_q)" if batch else "(N, H_q, T_q)"
        _refuse_shape("lses", lses, f"{(parts, *batch, heads, rows)} = {sizes}")

    dtype = torch.promote_types(lses.dtype, torch.float32)
    lses = lses.to(dtype)
    # Any number would do that keeps exp within bounds, so the largest one needs no gradient.
    reference = lses.detach().amax(dim=0)
    reference = reference.masked_fill(reference == -torch.inf, 0)
    weights = (lses - reference).exp()
    total = weights.sum(dim=0)
    blind = total == 0
    total = total.masked_fill(blind, 1)
    lse = (reference + total.log()).masked_fill(blind, -torch.inf)
    shares = (weights / total).transpose(-1, -2)[..., None]  # (N, B, S_q, H_q, 1)
    unseen = (lses == -torch.inf).transpose(-1, -2)[..., None]
    out = (shares * outs.to(dtype).masked_fill(unseen, 0)).sum(dim=0)
    return out.to(outs.dtype), lse


def _stacked(name, parts):
    if not isinstance(parts, Tensor):
        parts = tuple(parts) if isinstance(parts, Iterable) else (parts,)
        if not parts or not all(isinstance(x, Tensor) for x in parts):
            raise TypeError(f"combine: {name} is {parts!r}, expected a tensor, or a sequence of at least one")
        for x in parts[1:]:
            if x.shape != parts[0].shape:
                _refuse_shape(f"one of {name}", x, f"{tuple(parts[0].shape)}, as the first one")
        parts = torch.stack(parts)
    if not parts.is_floating_point():
        raise TypeError(f"combine: {name} has dtype {parts.dtype}, expected a floating dtype")
    return parts


def _refuse_shape(name, x, expected):
    raise ValueError(f"combine: {name} has shape {tuple(x.shape)}, expected {expected}")
