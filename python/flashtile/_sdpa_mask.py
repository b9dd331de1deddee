"""A ColumnMask in the place of PyTorch's attn_mask: whether it fits, and what PyTorch gets where it has to compute."""

import torch
from torch import Tensor

from .masks import ColumnMask

_WHERE = "scaled_dot_product_attention: attn_mask"


def refuse_misfit(mask, query, key):
    """Raises an error that says what about `mask` does not fit query (..., H_q, S_q, D) and key (..., H_k, S_k, D)."""
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() < 2:
            raise TypeError(f"{_WHERE} is {mask}, expected a Tensor or None, as {name} is no dense tensor (..., S, D)")
    if mask.seqlen_q is None:
        raise ValueError(f"{_WHERE} is {mask}, expected one of equally long sequences")
    batch, heads, seqlen_k, _ = mask.ranges.shape
    if (mask.seqlen_q, seqlen_k) != (query.shape[-2], key.shape[-2]):
        raise ValueError(f"{_WHERE} is {mask}, expected S_q = {query.shape[-2]} and S_k = {key.shape[-2]}")
    leading, heads_q, heads_k = _sizes(query, key)
    if batch not in (1, leading.numel()):
        raise ValueError(f"{_WHERE} is {mask}, expected B = 1 or {leading.numel()}, the leading dimensions together")
    if heads not in (1, heads_k, heads_q):
        raise ValueError(f"{_WHERE} is {mask}, expected H = 1, H_k = {heads_k} or H_q = {heads_q}")
    if mask.device != query.device:
        raise ValueError(f"{_WHERE} is on {mask.device}, expected {query.device}, as query")


def written_out(mask, query, key, is_causal):
    """The mask as PyTorch wants it: bool, broadcastable to (..., H_q, S_q, S_k), with that of is_causal."""
    leading, heads_q, _ = _sizes(query, key)
    visible = mask.to_dense()
    batch, heads, seqlen_q, seqlen_k = visible.shape
    if heads not in (1, heads_q):
        visible = visible.repeat_interleave(heads_q // heads, dim=1)
    if is_causal:
        visible = visible & torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=visible.device).tril()
    visible = visible.reshape(*(leading if batch != 1 else ()), *visible.shape[1:])
    return visible[0] if query.dim() == key.dim() == 2 else visible  # which has no heads


def first_columns(mask, count):
    return ColumnMask(mask.ranges[:, :, :count], mask.seqlen_q)


def _sizes(query, key):
    """The leading dimensions of both, broadcast, and H_q, to which one head broadcasts, and H_k; 1 without heads."""
    heads_q, heads_k = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key))
    return torch.broadcast_shapes(query.shape[:-3], key.shape[:-3]), max(heads_q, heads_k), heads_k
