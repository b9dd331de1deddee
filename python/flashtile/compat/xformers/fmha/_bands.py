"""What a bias lets a row see of its block, ours or one of xformers', told by the name of its class."""

from typing import NamedTuple

import torch
from torch import Tensor


class Band(NamedTuple):
    """Row i sees column j of its block where -left ≤ j - i ≤ right; both are counted from the block's first row and
    column, or backwards from the last ones. None is unbounded."""

    left: int | None
    right: int | None
    from_first: bool

    def visible(self, rows: int, columns: int) -> Tensor:
        """(rows, columns) bool of one block."""
        distance = torch.arange(columns) - torch.arange(rows)[:, None]
        if not self.from_first:
            distance = distance - (columns - rows)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen &= distance >= -self.left
        if self.right is not None:
            seen &= distance <= self.right
        return seen

    def window(self, rows: int, columns: int) -> tuple[int | None, int | None] | None:
        """The same as flashtile's window, which is counted from the last row and column, of a block of this size."""
        shift = rows - columns if self.from_first else 0
        window = (None if self.left is None else self.left - shift, None if self.right is None else self.right + shift)
        return None if window == (None, None) else window


_KINDS = {  # (whether a row sees no later column, whether from the first row and column)
    "LowerTriangularMask": (True, True),
    "LowerTriangularFromBottomRightMask": (True, False),
    "LowerTriangularFromBottomRightLocalAttentionMask": (True, False),
    "LocalAttentionFromBottomRightMask": (False, False),
    "BlockDiagonalMask": (False, False),
    "BlockDiagonalCausalMask": (True, True),
    "BlockDiagonalCausalFromBottomRightMask": (True, False),
    "BlockDiagonalCausalLocalAttentionMask": (True, True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (True, False),
    "BlockDiagonalPaddedKeysMask": (False, False),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (True, False),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (False, False),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (True, False),
    "BlockDiagonalGappyKeysMask": (False, False),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (True, False),
    "PagedBlockDiagonalPaddedKeysMask": (False, False),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (True, False),
}


def band_of(bias) -> Band | None:
    """None if it is no bias of these classes."""
    kind = _KINDS.get(type(bias).__name__)
    if kind is None:
        return None
    causal, from_first = kind
    size = getattr(bias, "_window_size", None)  # which counts the row's own column
    left = getattr(bias, "window_left", None) if size is None else size - 1
    return Band(left, 0 if causal else getattr(bias, "window_right", None), from_first)
