"""``flash_attn.bert_padding`` in plain PyTorch: between padded batches (B, S, ...) and ragged ones (T, ...).

>>> import torch
>>> from flashtile.compat.bert_padding import pad_input, unpad_input
>>> x, mask = torch.randn(2, 5, 64), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
>>> rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
>>> rows.shape, cu_seqlens.tolist(), max_seqlen
(torch.Size([8, 64]), [0, 3, 8], 5)
>>> torch.equal(pad_input(rows, indices, batch=2, seqlen=5), x * mask[..., None])
True
"""

import torch
from torch import Tensor

from ._common import require_tensors

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """``x[indices]``: the rows of x, (N, ...), that ``indices``, (T), int32 or int64, names. Differentiable."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse: (first_axis_dim, ...), with values, (T, ...), at ``indices``, which differ, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch, (batch, seqlen, ...), of the rows (T, ...). Differentiable.

    Args:
        hidden_states: (T, ...), of any dtype.
        indices: (T), where each row stands among the batch · seqlen ones, as :func:`unpad_input` returns it. All other
            rows are 0.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that count, one behind the other. Waits for the device, which knows how many.

    Args:
        hidden_states: (B, S, ...), of any dtype.
        attention_mask: (B, S), bool or a number: rows that are not 0 count.
        unused_mask: (B, S): rows to keep that do not count; none by default.

    Returns:
        rows: (T, ...): those of either mask, differentiable.
        indices: (T), int64: where they stood among the B · S ones.
        cu_seqlens: (B + 1), int32: where each sequence begins, and where the last one ends.
        max_seqlen: the longest sequence, an int.
        seqused: (B), int32: how many rows of each sequence attention_mask has.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a mask has another shape than (B, S).
    """
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        masks["unused_mask"] = unused_mask
    require_tensors("unpad_input", hidden_states=hidden_states, **masks)
    for name, mask in masks.items():
        if mask.shape != hidden_states.shape[:2]:
            expected = f"{tuple(hidden_states.shape[:2])} = (B, S)"
            raise ValueError(f"unpad_input: {name} has shape {tuple(mask.shape)}, expected {expected}")
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if len(lengths) > 0 else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, max_seqlen, used.sum(dim=1, dtype=torch.int32)
