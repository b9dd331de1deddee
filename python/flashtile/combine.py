"""Attention over keys in parts, put together."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ._core import require_tensors


def combine(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the results over N parts of them that share none.

    Each part is what :func:`attention` and its kin return with ``return_lse=True``, of the same queries::

        lse = log(Σ_n exp(lses[n]))
        out = Σ_n exp(lses[n] - lse) · outs[n]

    Args:
        outs: (N, B, S_q, H_q, D_v), or ragged (N, T_q, H_q, D_v), of any floating dtype; or a sequence of N tensors.
        lses: (N, B, H_q, S_q), or (N, H_q, T_q), natural logarithms, of any floating dtype of more than 8 bits; or a
            sequence of N tensors. Where a part's is -inf, it saw nothing, and what its out holds there does not count.

    Returns:
        (out, lse), of a part's shapes: out of the dtype of ``outs``, lse float32. All is computed in float32 (in
        float64 where lses are), by operations of PyTorch: both results are differentiable with respect to outs and
        lses. A row that saw nothing in any part has out = 0, lse = -inf and gradients 0.

    Masks, and ALiBi, go by the distance from the diagonal, which lies elsewhere in each part: they are the caller's to
    shift. Sinks belong to one part alone.

    Raises:
        TypeError: an argument holds something else than dense floating tensors.
        ValueError: shapes break the rules above, or tensors are on several devices.

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
    if lses.element_size() == 1:
        raise TypeError(f"combine: lses has dtype {lses.dtype}, expected a floating dtype of more than 8 bits")
    if lses.device != outs.device:
        raise ValueError(f"combine: lses is on {lses.device}, expected {outs.device}, as outs")
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
    if isinstance(parts, Tensor):
        _check(name, parts)
        return parts
    if not isinstance(parts, Iterable):
        require_tensors("combine", **{name: parts})
    parts = tuple(parts)
    if not parts:
        raise TypeError(f"combine: {name} is an empty sequence, expected at least one tensor")
    for i, x in enumerate(parts):
        _check(f"{name}[{i}]", x)
        if x.shape != parts[0].shape:
            _refuse_shape(f"{name}[{i}]", x, f"{tuple(parts[0].shape)}, as {name}[0]")
        if x.device != parts[0].device:
            raise ValueError(f"combine: {name}[{i}] is on {x.device}, expected {parts[0].device}, as {name}[0]")
    return torch.stack(parts)


def _check(name, x):
    require_tensors("combine", **{name: x})
    if not x.is_floating_point():
        raise TypeError(f"combine: {name} has dtype {x.dtype}, expected a floating dtype")


def _refuse_shape(name, x, expected):
    raise ValueError(f"combine: {name} has shape {tuple(x.shape)}, expected {expected}")
