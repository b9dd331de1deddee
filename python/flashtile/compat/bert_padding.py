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

from ._common import index_within, integer, require_rank, require_tensors

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """``x[indices]``: the rows of x, (N, ...), that ``indices``, (T), int32 or int64, names. Differentiable."""
    function = "index_first_axis"
    _check_rows(function, x, indices, x=x)
    _check_range(function, indices, x.shape[0], "x")
    return x.index_select(0, indices)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(:func:`index_first_axis`, x without its gradient), for a residual connection."""
    return index_first_axis(x, indices), x.detach()


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse: (first_axis_dim, ...), with values, (T, ...), at ``indices``, which differ, and 0 elsewhere."""
    function = "index_put_first_axis"
    _check_rows(function, values, indices, values=values)
    return _put(function, values, indices, integer(function, "first_axis_dim", first_axis_dim, at_least=0))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch, (batch, seqlen, ...), of the rows (T, ...). Differentiable.

    Args:
        hidden_states: (T, ...), of any dtype.
        indices: (T), where each row stands among the batch · seqlen ones, as :func:`unpad_input` returns it. All other
            rows are 0.
    """
    function = "pad_input"
    _check_rows(function, hidden_states, indices, hidden_states=hidden_states)
    sizes = [integer(function, name, n, at_least=0) for name, n in (("batch", batch), ("seqlen", seqlen))]
    return _put(function, hidden_states, indices, sizes[0] * sizes[1]).unflatten(0, sizes)


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
        _check_mask("unpad_input", name, mask, hidden_states)
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if len(lengths) > 0 else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, max_seqlen, used.sum(dim=1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The rows of a padded batch whose entries are several sequences, one behind the other. Waits for the device.

    Args:
        hidden_states: (B, S, ...), of any dtype.
        attention_mask_in_length: (B, S), integers: the lengths of an entry's sequences, in any places, and 0 elsewhere.
            As many rows as they sum up to count, from the entry's first one.

    Returns:
        rows: (T, ...): those that count, differentiable.
        indices: (T), int64: where they stood among the B · S ones.
        cu_seqlens: (N + 1), int32: where each of the N sequences begins, and where the last one ends.
        max_seqlen: the longest sequence, an int.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: attention_mask_in_length has another shape than (B, S).

    Example:
        >>> lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
        >>> *_, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(torch.randn(2, 6, 64), lengths)
        >>> cu_seqlens.tolist(), max_seqlen
        ([0, 2, 5, 11], 6)
    """
    function = "unpad_input_for_concatenated_sequences"
    lengths = attention_mask_in_length
    require_tensors(function, hidden_states=hidden_states, attention_mask_in_length=lengths)
    _check_mask(function, "attention_mask_in_length", lengths, hidden_states)
    used = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(dim=1, keepdim=True)
    indices = used.flatten().nonzero().flatten()
    lengths = lengths[lengths != 0].int()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if len(lengths) > 0 else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def _check_mask(function, name, mask, hidden_states):
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        expected = f"{tuple(hidden_states.shape[:2])} = (B, S)"
        raise ValueError(f"{function}: {name} has shape {tuple(mask.shape)}, expected {expected}")


def _check_rows(function, rows, indices, **named):
    require_tensors(function, **named)
    require_rank(function, 1, "(T)", indices=indices)
    if rows.dim() == 0:
        raise ValueError(f"{function}: {next(iter(named))} has shape (), expected (rows, ...)")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: indices has dtype {indices.dtype}, expected torch.int32 or torch.int64")
    if indices.device != rows.device:
        raise ValueError(f"{function}: indices is on {indices.device}, expected {rows.device}")


def _check_range(function, indices, count, what):
    """PyTorch looks at those on a GPU."""
    if indices.device.type == "cpu":
        index_within(function, "an entry of indices", indices, count, what)


def _put(function, rows, indices, count):
    if rows.shape[0] != indices.shape[0]:
        raise ValueError(
            f"{function}: indices has shape {tuple(indices.shape)}, expected {(rows.shape[0],)}, one a row"
        )
    _check_range(function, indices, count, "the result")
    return rows.new_zeros(count, *rows.shape[1:]).index_copy(0, indices.long(), rows)
