"""FlashMask's function, with the parameters that PaddlePaddle gives it, of torch tensors, computed by flashtile.

>>> import torch
>>> from flashtile.compat.flashmask import flashmask_attention
>>> q = torch.randn(1, 6, 4, 64)
>>> ends = torch.tensor([2, 2, 6, 6, 6, 6]).int()  # of documents of 2 and 4 tokens: from there on a column is hidden
>>> flashmask_attention(q, q, q, ends.view(1, 1, 6, 1), causal=True).shape
torch.Size([1, 6, 4, 64])
"""

from torch import Tensor

from ..attention import attention
from ..masks import ColumnMask
from ._common import flag, refuse_unserved, require_tensors

__all__ = ["flashmask_attention"]

_FUNCTION = "flashmask_attention"


def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: Tensor | None = None,
    use_varlen: bool = False,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flashtile.attention` under the mask that `startend_row_indices` are.

    Args:
        query: (B, S_q, H_q, D), key (B, S_k, H_k, D) and value (B, S_k, H_k, D_v), as `flashtile.attention` takes them.
        startend_row_indices: int32, (B or 1, 1 or H_k or H_q, S_k, n), which rows each column is hidden from: see
            :meth:`flashtile.masks.ColumnMask.from_startend_row_indices`. None: none but what causal hides.
        dropout: the probability with which a weight is dropped while `training`. Its seed comes from PyTorch's CPU
            generator.
        causal: hide what is right of the diagonal, too; n is 1 or 2 then, and 2 or 4 otherwise.
        window_size: how many keys a row sees on either side of its own, one number or (left, right); causal leaves
            those on the left. In the place of startend_row_indices.
        return_softmax_lse: also return lse, float32, (B, H_q, S_q).
        softmax_scale: by default 1/√D.
        name: no effect, as use_varlen.
        learnable_sink: (H_q), float32: a logit of each head that takes its share of the weights.
        return_seed_offset, fixed_seed_offset, rng_name, block_mask: refused, unless they are what they are by default.

    Returns:
        out, (B, S_q, H_q, D_v), or with `return_softmax_lse` the pair (out, lse).

    Raises:
        NotImplementedError: an argument asks for what flashtile does not compute.
        TypeError, ValueError: as of `flashtile.attention` and `ColumnMask`; or there are both startend_row_indices and
            window_size; or a window_size is negative.
    """
    unserved = {"fixed_seed_offset": fixed_seed_offset, "block_mask": block_mask, "rng_name": rng_name or None}
    refuse_unserved(_FUNCTION, **unserved, return_seed_offset=return_seed_offset or None)
    require_tensors(_FUNCTION, query=query, key=key)
    causal = flag(_FUNCTION, "causal", causal)
    mask, window = None, None
    if window_size is not None:
        if startend_row_indices is not None:
            raise ValueError(f"{_FUNCTION}: window_size is {window_size}, expected None with startend_row_indices")
        window = (window_size, window_size) if isinstance(window_size, int) else tuple(window_size)
        if any(isinstance(side, int) and side < 0 for side in window):
            raise ValueError(f"{_FUNCTION}: window_size is {window_size}, expected numbers of at least 0")
    elif startend_row_indices is not None:
        seqlen_q = query.shape[1] if query.dim() == 4 else 0  # attention says what is wrong with others
        mask = ColumnMask.from_startend_row_indices(startend_row_indices, causal, seqlen_q)
    return_lse = flag(_FUNCTION, "return_softmax_lse", return_softmax_lse)
    return attention(
        query,
        key,
        value,
        causal=causal,
        window=window,
        mask=mask,
        scale=softmax_scale,
        dropout_p=dropout if training else 0.0,
        sinks=learnable_sink,
        return_lse=return_lse,
    )
